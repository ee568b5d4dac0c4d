"""Student-t quantiles against SciPy and against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from xrpo_fast.planner import student_t_quantile

RELATIVE_ERROR = 1e-12
# Near the middle SciPy 1.17's t.ppf loses digits at df = 2, 4 and 6 (1.8e-11 at p = 0.499, all of
# them at 0.5 + 1e-9); its inverse incomplete beta function does not, so that is the truth there.
MIDDLE = 0.05

TAIL = st.floats(-9.0, math.log10(0.5)).map(lambda e: min(max(10.0**e, 1e-9), 0.5))
P = st.tuples(TAIL, st.booleans()).map(lambda pair: 1.0 - pair[0] if pair[1] else pair[0])
DF = st.one_of(st.integers(1, 10**6).map(float), st.floats(0.0, 6.0).map(lambda e: 10.0**e))


def scipy_quantile(p, df):
    p, df = np.broadcast_arrays(p, df)
    d = p - 0.5
    z = special.betaincinv(0.5, df / 2, np.minimum(2 * np.abs(d), 2 * MIDDLE))
    middle = np.copysign(np.sqrt(df * z / (1 - z)), d)
    return np.where(np.abs(d) < MIDDLE, middle, stats.t.ppf(p, df))


@given(P.filter(lambda p: p != 0.5), DF)
def test_equals_scipy(p, df):
    truth = float(scipy_quantile(p, df))
    assert student_t_quantile(p, df) == pytest.approx(truth, rel=RELATIVE_ERROR, abs=0)


def test_equals_scipy_on_a_grid():
    df = np.unique(np.concatenate([np.arange(1, 200), np.geomspace(1, 1e6, 400)]))
    tail = np.geomspace(1e-9, 0.499, 40)
    p = np.concatenate([tail, 1.0 - tail, [0.975, 0.95, 0.995]])
    truth = scipy_quantile(p, df[:, None])
    error = np.abs(student_t_quantile(p, df[:, None]) - truth) / np.abs(truth)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= RELATIVE_ERROR, (df[worst[0]], p[worst[1]], error.max())


@given(P)
def test_equals_closed_form_at_one_two_and_four(p):
    d = p - 0.5
    spread = 4.0 * p * (1.0 - p)
    assert student_t_quantile(p, 2) == pytest.approx(2.0 * d * math.sqrt(2.0 / spread), rel=1e-13)
    # Hill 1970: t_4 = sign(d) 2 sqrt(cos(acos(sqrt(spread)) / 3) / sqrt(spread) - 1), ill
    # conditioned near the middle, where t = d / density(0) + O(d^3) takes over.
    root = math.sqrt(spread)
    if abs(d) > 1e-2:
        four = 2.0 * math.sqrt(math.cos(math.acos(root) / 3.0) / root - 1.0)
        assert student_t_quantile(p, 4) == pytest.approx(math.copysign(four, d), rel=1e-11)
        one = math.copysign(1.0 / math.tan(math.pi * min(p, 1.0 - p)), d)
        assert student_t_quantile(p, 1) == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 6, 1000, 10**6])
def test_middle_is_linear(df):
    density = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi * df)
    for d in (2.0**-30, 2.0**-45):
        expected = d / density  # the next term is d^3: below 1e-17 relative
        assert student_t_quantile(0.5 + d, df) == pytest.approx(expected, rel=1e-8)
        assert student_t_quantile(0.5 - d, df) == -student_t_quantile(0.5 + d, df)
    assert student_t_quantile(0.5, df) == 0.0


@given(P, DF)
def test_increases_in_p(p, df):
    above = min(np.nextafter(p, 1.0) * (1 + 1e-9), 1 - 1e-10)
    assert student_t_quantile(above, df) > student_t_quantile(p, df)


def test_broadcasts_and_returns_floats_for_scalars():
    table = student_t_quantile([0.9, 0.975], [[1.0], [7.0], [30.0]])
    assert table.shape == (3, 2)
    assert table[1, 1] == student_t_quantile(0.975, 7)
    assert isinstance(student_t_quantile(0.975, 7), float)


@pytest.mark.parametrize("p", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_rejects_p(p):
    with pytest.raises(ValueError, match=r"p: expected 0 < p < 1, got"):
        student_t_quantile(p, 3)


@pytest.mark.parametrize("df", [0.0, 0.99, -1.0, math.nan, math.inf])
def test_rejects_df(df):
    with pytest.raises(ValueError, match=r"df: expected a finite df >= 1, got"):
        student_t_quantile(0.9, df)
