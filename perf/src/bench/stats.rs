//! Statistics of repeated runs: medians, quartiles, ratios of pairs. Pure functions.
//!
//! *Why pairs.* Absolute figures of a machine drift by more than what is to be told apart; two runs one after the other
//! see the same machine. So a comparison is the median of the ratios within pairs, never the ratio of medians.

use serde::{Deserialize, Serialize};

/// The middle of some values and where their middle half lies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Median.
    pub median: f64,
    /// First quartile.
    pub q1: f64,
    /// Third quartile.
    pub q3: f64,
}

impl Summary {
    /// Of any number of values; none of nothing. Values that are not finite are left out.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |part| quantile(&sorted, part);
        Some(Self { median: at(0.5)?, q1: at(0.25)?, q3: at(0.75)? })
    }

    /// Interquartile range.
    #[must_use]
    pub fn iqr(&self) -> f64 {
        self.q3 - self.q1
    }

    /// Whether the middle halves share a value.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.q1 <= other.q3 && other.q1 <= self.q3
    }
}

/// The value below which `part` (0 to 1) of the sorted values lie, interpolated between the two nearest.
#[must_use]
pub fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let place = part.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * place.fract())
}

/// The ratios `a / b` of pairs; a pair with a zero or missing divisor is left out.
#[must_use]
pub fn paired_ratios(a: &[f64], b: &[f64]) -> Option<Summary> {
    Summary::of(a.iter().zip(b).filter(|(_, b)| **b > 0.0).map(|(a, b)| a / b))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let summary = Summary::of([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(summary, Summary { median: 2.5, q1: 1.75, q3: 3.25 });
        assert_eq!(summary.iqr(), 1.5);
        assert_eq!(Summary::of([7.0]), Some(Summary { median: 7.0, q1: 7.0, q3: 7.0 }));
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary::of([f64::NAN, f64::INFINITY, 1.0]).unwrap().median, 1.0);
    }

    #[test]
    fn ratios_are_of_pairs() {
        // The machine got three times as fast in between: the ratio does not see it.
        let ratio = paired_ratios(&[100.0, 300.0, 100.0], &[50.0, 150.0, 50.0]).unwrap();
        assert_eq!(ratio, Summary { median: 2.0, q1: 2.0, q3: 2.0 });
        assert_eq!(paired_ratios(&[1.0], &[0.0]), None);
        assert_eq!(paired_ratios(&[], &[1.0]), None);
    }

    #[test]
    fn overlap_is_of_the_middle_halves() {
        let summary = |q1, q3| Summary { median: (q1 + q3) / 2.0, q1, q3 };
        assert!(summary(1.0, 3.0).overlaps(&summary(3.0, 4.0)));
        assert!(!summary(1.0, 2.0).overlaps(&summary(2.5, 4.0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn quartiles_are_in_order_and_within(values in proptest::collection::vec(0.0_f64..1e9, 1..40)) {
            let summary = Summary::of(values.iter().copied()).unwrap();
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            prop_assert!(least <= summary.q1 && summary.q1 <= summary.median);
            prop_assert!(summary.median <= summary.q3 && summary.q3 <= most);
        }
    }
}
