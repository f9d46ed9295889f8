//! How a figure grows with the size of what it was measured on.

/// The straight line nearest to what was measured (least squares).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// What nothing would cost.
    pub base: f64,
    /// What one more costs.
    pub slope: f64,
}

impl Line {
    /// Through `points`, each a size and what was measured there; not a number where all are of one
    /// size.
    #[must_use]
    pub fn through(points: &[(f64, f64)]) -> Self {
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let along: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let slope = along / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>();
        Self { base: y - slope * x, slope }
    }

    /// What it comes to at `size`.
    #[must_use]
    pub fn at(self, size: f64) -> f64 {
        self.base + self.slope * size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_through_points_on_a_line_is_that() {
        let line = Line::through(&[(1.0, 5.0), (3.0, 9.0), (10.0, 23.0)]);
        assert!((line.base - 3.0).abs() < 1e-9 && (line.slope - 2.0).abs() < 1e-9, "{line:?}");
        assert!((line.at(100.0) - 203.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_off_the_line_weighs_on_both_sides() {
        let line = Line::through(&[(0.0, 1.0), (1.0, 0.0), (2.0, 1.0), (3.0, 0.0)]);
        assert!((line.slope + 0.2).abs() < 1e-9 && (line.base - 0.8).abs() < 1e-9, "{line:?}");
    }

    #[test]
    fn one_size_alone_tells_of_no_growth() {
        assert!(Line::through(&[(2.0, 1.0), (2.0, 3.0)]).slope.is_nan());
    }
}
