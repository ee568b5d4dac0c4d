"""Colours and style sheet of the page, light and dark."""

from xrpo_fast.report.charts import GRID, INK, MUTED, PART_COLOURS, RUN_COLOURS, VARIABLES

_DARK = {
    INK: "#eceef1",
    MUTED: "#9aa2ad",
    GRID: "#2b3037",
    **dict(
        zip(
            RUN_COLOURS,
            (
                "#6ea0ff",
                "#ff8a57",
                "#3fc7a0",
                "#d684e6",
                "#e0b440",
                "#ff7aa5",
                "#9fb6c9",
                "#c99a74",
            ),
            strict=True,
        )
    ),
    **dict(
        zip(
            PART_COLOURS,
            (
                "#5b8bd4",
                "#6fb3ac",
                "#d69c5f",
                "#a48bcb",
                "#cc7a98",
                "#a9b95a",
                "#7d8792",
                "#505962",
            ),
            strict=True,
        )
    ),
}

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,
-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1160px;margin:0 auto;padding:56px 24px 96px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;font-weight:650;margin:0 0 20px}
h2{font-size:22px;letter-spacing:-.01em;font-weight:620;margin:72px 0 4px}
h3{font-size:15px;font-weight:620;margin:0}
h4{font-size:13px;font-weight:500;margin:0 0 8px;color:var(--muted)}
p.lead{color:var(--muted);max-width:68ch;margin:0 0 24px}
.facts{list-style:none;margin:0 0 32px;padding:0;color:var(--muted);font-size:14px}
.facts li{margin:6px 0;overflow-wrap:anywhere}
.chip{color:var(--ink);font-weight:600;white-space:nowrap}
.chip::before{content:"";display:inline-block;width:10px;height:10px;border-radius:50%;
background:var(--c);margin-right:8px}
.note{margin:4px 0 4px 18px;padding-left:12px;border-left:3px solid var(--warn);color:var(--ink)}
.summary{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
.summary th,.summary td{padding:10px 12px;text-align:left;vertical-align:top;
border-bottom:1px solid var(--grid)}
.summary thead th{color:var(--muted);font-weight:500;font-size:12.5px;line-height:1.3;
vertical-align:bottom}
.summary td{font-size:17px}
.summary th:first-child{padding-left:0}
.summary small{display:block;font-size:12px;color:var(--muted);white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
gap:36px 32px}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{margin-bottom:8px;min-height:60px}
figure.wide figcaption{min-height:0}
figcaption span{display:block;color:var(--muted);font-size:13px;line-height:1.35}
figure svg{display:block;width:100%;height:auto;overflow:visible}
figure svg text{font-family:inherit!important}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 0;padding:0;
font-size:13px;color:var(--muted)}
.legend li::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;
background:var(--c);margin-right:7px}
.sample{padding:24px 0;border-bottom:1px solid var(--grid)}
.sample:last-child{border-bottom:0}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr));
gap:20px 32px;margin-top:16px}
.answers p{margin:6px 0 0;font-size:12.5px;color:var(--muted)}
pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:8px 0 0;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:340px;overflow:auto}
.answers pre{background:var(--panel);padding:12px 14px;border-radius:6px}
.tag{font-size:12px;font-weight:500;color:var(--muted);margin-left:6px}
.tag.right{color:var(--good)}
.tag.wrong{color:var(--bad)}
.missing{color:var(--muted)}
@media(max-width:700px){
main{padding:32px 16px 64px}
h1{font-size:27px}
h2{margin-top:52px}
figcaption{min-height:0}
.charts{gap:28px}
figure.wide .scroll{overflow-x:auto}
figure.wide svg{min-width:760px}
.summary thead{display:none}
.summary,.summary tbody{display:block}
.summary tr{display:grid;grid-template-columns:1fr 1fr;gap:14px 16px;padding:16px 0;
border-bottom:1px solid var(--grid)}
.summary th,.summary td{display:block;padding:0;border:0}
.summary tbody th{grid-column:1/-1}
.summary td::before{content:attr(data-label);display:block;font-size:12px;line-height:1.3;
color:var(--muted)}
}
@media print{figure,.sample{break-inside:avoid}}
"""


def _variables(colours: dict[str, str], **more: str) -> str:
    pairs = {VARIABLES[light]: shown for light, shown in colours.items()} | more
    return "".join(f"--{name}:{shown};" for name, shown in pairs.items())


def style_css() -> str:
    """Theme variables, light and dark, and the rules of the page."""
    light = _variables(
        {value: value for value in VARIABLES},
        paper="#ffffff",
        panel="#f5f6f8",
        warn="#d99a00",
        good="#0d7d4d",
        bad="#c0392b",
    )
    dark = _variables(
        _DARK, paper="#121417", panel="#1b1f24", warn="#e0b440", good="#4fd08f", bad="#ff8b7d"
    )
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_CSS}"
    )
