//! A plot of values over time: lines in a stretched SVG, with words around it in HTML, which keep
//! their size on a small screen. What would be drawn over its neighbour is left out, so that marks
//! have a limit.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::html::escaped;

/// Height and width of the drawing, which is stretched over the page.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 200.0;

/// One line.
pub(crate) struct Series {
    pub(crate) name: &'static str,
    /// Time in seconds and value; none: it is not known there, and the line is broken.
    pub(crate) points: Vec<(f64, Option<f64>)>,
    /// The value holds until the next one.
    pub(crate) steps: bool,
}

/// A stretch of time that is marked.
pub(crate) struct Shade {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) why: &'static str,
}

/// What all plots of a page have in common.
pub(crate) struct Axis {
    /// The end of time, in seconds.
    pub(crate) end: f64,
    /// Where rounds ended.
    pub(crate) rounds: Vec<f64>,
    pub(crate) shades: Vec<Shade>,
}

impl Axis {
    fn x(&self, time: f64) -> f64 {
        (time / self.end.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0) * WIDTH
    }
}

/// A value that is larger is drawn as this one: no file may keep a plot from ending.
pub(crate) const LARGEST: f64 = 1e18;

/// What the values of a plot are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Bytes, or bytes a second: marks are at round numbers of KiB, MiB and so on.
    Bytes,
    /// Shares of one.
    Share,
}

impl Unit {
    /// The distance of marks on an axis that goes up to `end`.
    fn tick(self, end: f64) -> f64 {
        let mut scale = 1.0;
        while self == Self::Bytes && end >= 1024.0 * scale {
            scale *= 1024.0;
        }
        tick(end / scale) * scale
    }
}

/// A figure with `series`, whose values `say` puts into words.
pub(crate) fn chart(
    title: &str,
    axis: &Axis,
    series: &[Series],
    unit: Unit,
    say: impl Fn(f64) -> String,
) -> String {
    let values = series.iter().flat_map(|series| series.points.iter().filter_map(|point| point.1));
    let highest = values.fold(1.0, f64::max).min(LARGEST);
    let end = axis.end.min(LARGEST);
    let step = unit.tick(highest);
    let top = (highest / step).ceil().max(1.0) * step;
    let mut html = format!("<figure><figcaption><b>{}</b>", escaped(title));
    for (number, series) in series.iter().enumerate() {
        let _ = write!(html, " <span class=\"key s{number}\">{}</span>", escaped(series.name));
    }
    html += "</figcaption><div class=\"plot\">";
    let mut at = 0.0;
    while at <= top * 1.0001 {
        let up = at / top * 100.0;
        let _ = write!(html, "<i class=\"y\" style=\"bottom:{up:.1}%\">{}</i>", escaped(&say(at)));
        at += step;
    }
    let _ = write!(
        html,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{}\">",
        escaped(title)
    );
    html += &shades(axis);
    let mut lines = String::new();
    let mut at = step;
    while at < top * 1.0001 {
        let y = HEIGHT * (1.0 - at / top);
        let _ = write!(lines, "M0 {y:.1}H{WIDTH}");
        at += step;
    }
    let _ = write!(html, "<path class=\"grid\" d=\"{lines}\"/>");
    let mut ends: Vec<f64> = axis.rounds.iter().map(|end| axis.x(*end)).collect();
    ends.dedup_by(|end, before| *end - *before < 1.0);
    let rounds: String = ends.iter().map(|end| format!("M{end:.1} 0V{HEIGHT}")).collect();
    let _ = write!(html, "<path class=\"round\" d=\"{rounds}\"/>");
    for (number, series) in series.iter().enumerate() {
        let _ = write!(html, "<path class=\"line s{number}\" d=\"{}\"/>", path(axis, series, top));
    }
    html += "</svg>";
    let step = tick(end);
    let mut at = 0.0;
    while at <= end * 1.0001 && end > 0.0 {
        let along = at / end * 100.0;
        let _ = write!(html, "<i class=\"x\" style=\"left:{along:.1}%\">{}</i>", seconds(at));
        at += step;
    }
    html + "</div></figure>"
}

/// A path for each reason of shades; those with less than 1 between them are one.
fn shades(axis: &Axis) -> String {
    let mut html = String::new();
    let reasons: BTreeSet<&str> = axis.shades.iter().map(|shade| shade.why).collect();
    for why in reasons {
        let mut joined: Vec<(f64, f64)> = Vec::new();
        for shade in axis.shades.iter().filter(|shade| shade.why == why) {
            let (from, to) = (axis.x(shade.from), axis.x(shade.to));
            let to = to.max(from + 1.0);
            match joined.last_mut() {
                Some(last) if from - last.1 < 1.0 => last.1 = to.max(last.1),
                _ => joined.push((from, to)),
            }
        }
        let path: String =
            joined.iter().map(|(from, to)| format!("M{from:.1} 0V{HEIGHT}H{to:.1}V0z")).collect();
        let why = escaped(why);
        let _ = write!(html, "<path class=\"shade\" d=\"{path}\"><title>{why}</title></path>");
    }
    html
}

/// The line of `series` as the `d` of a path.
fn path(axis: &Axis, series: &Series, top: f64) -> String {
    let mut path = String::new();
    let mut before: Option<f64> = None;
    for (time, value) in &series.points {
        let Some(value) = value else {
            before = None;
            continue;
        };
        let (x, y) = (axis.x(*time), HEIGHT * (1.0 - (value / top).clamp(0.0, 1.0)));
        match before {
            None => drop(write!(path, "M{x:.1} {y:.1}h0.1")),
            Some(_) if series.steps => drop(write!(path, "H{x:.1}V{y:.1}")),
            Some(_) => drop(write!(path, "L{x:.1} {y:.1}")),
        }
        before = Some(y);
    }
    path
}

/// The distance of marks on an axis that goes up to `end`, of which there are two to five.
fn tick(end: f64) -> f64 {
    if !end.is_finite() || end <= 0.0 {
        return 1.0;
    }
    let rough = end / 4.0;
    let unit = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|times| times * unit)
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * unit)
}

/// A time on the axis.
fn seconds(time: f64) -> String {
    if time >= 600.0 {
        let rounded = format!("{:.1}", time / 60.0);
        return format!("{} min", rounded.trim_end_matches(".0"));
    }
    let rounded = format!("{time:.2}");
    format!("{} s", rounded.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(end: f64) -> Axis {
        Axis { end, rounds: vec![end / 2.0], shades: Vec::new() }
    }

    #[test]
    fn an_axis_has_two_to_five_round_marks() {
        for end in [1e-9, 0.003, 0.7, 1.0, 9.9, 10.0, 10.1, 123.0, 7e9, 9.99e12] {
            let step = tick(end);
            assert!((2.0..=5.0).contains(&(end / step).ceil()), "{end}: {step}");
            let digits = format!("{step:e}");
            assert!(["1e", "2e", "2.5e", "5e"].iter().any(|start| digits.starts_with(start)));
        }
        assert_eq!((tick(0.0), tick(f64::NAN)), (1.0, 1.0));
        let mib = f64::from(1 << 20);
        assert_eq!(Unit::Bytes.tick(130.0 * mib), 50.0 * mib);
        assert_eq!((Unit::Bytes.tick(900.0), Unit::Share.tick(1.0)), (250.0, 0.25));
        assert_eq!(
            [0.0, 0.25, 30.0, 600.0, 930.0].map(seconds).join(" "),
            "0 s 0.25 s 30 s 10 min 15.5 min"
        );
    }

    #[test]
    fn a_line_is_broken_where_nothing_is_known() {
        let points = vec![(0.0, Some(1.0)), (1.0, Some(2.0)), (2.0, None), (3.0, Some(4.0))];
        let series = Series { name: "a", points, steps: false };
        assert_eq!(path(&axis(4.0), &series, 4.0), "M0.0 150.0h0.1L250.0 100.0M750.0 0.0h0.1");
        let series = Series { steps: true, ..series };
        assert_eq!(path(&axis(4.0), &series, 4.0), "M0.0 150.0h0.1H250.0V100.0M750.0 0.0h0.1");
    }

    #[test]
    fn what_would_lie_upon_its_neighbour_is_one_mark() {
        let why = "the guest is stopped";
        let shade = |from, to| Shade { from, to, why };
        let shades = vec![shade(0.1, 0.2), shade(0.2005, 0.3), shade(0.5, 0.5)];
        let axis = Axis { end: 1.0, rounds: vec![0.25, 0.2505, 0.4], shades };
        let html = chart("rates", &axis, &[], Unit::Bytes, |value| value.to_string());
        assert!(html.contains("d=\"M100.0 0V200H300.0V0zM500.0 0V200H501.0V0z\""), "{html}");
        assert!(html.contains("class=\"round\" d=\"M250.0 0V200M400.0 0V200\""), "{html}");
    }

    #[test]
    fn a_plot_of_nothing_is_one_all_the_same() {
        let html = chart("rates", &axis(0.0), &[], Unit::Bytes, |value| value.to_string());
        assert!(html.contains("<svg") && !html.contains("NaN") && !html.contains("inf"), "{html}");
    }
}
