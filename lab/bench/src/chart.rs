//! Bar charts in SVG with a logarithmic scale, into docs/charts.
//!
//! Plain text without a library: a chart is a few rectangles, and its source should diff well.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;

use crate::table::short;

/// A chart of several bars (series) in each of several groups.
pub struct Chart {
    /// What stands over it.
    pub title: String,
    /// What the bars measure, with the unit.
    pub axis: String,
    /// The names of the series.
    pub series: Vec<String>,
    /// A label, and the value of each series; one that is not a number draws no bar.
    pub groups: Vec<(String, Vec<f64>)>,
}

const COLOURS: [&str; 8] =
    ["#9aa5b1", "#1b6ca8", "#5aa9e6", "#a8d0f0", "#e07a3f", "#f2b68c", "#7a4a2b", "#4b8f5a"];
const LEFT: f64 = 290.0;
const PLOT: f64 = 640.0;
const BAR: f64 = 12.0;

impl Chart {
    /// Writes `docs/charts/NAME.svg`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str) -> anyhow::Result<()> {
        let dir = Path::new("docs/charts");
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(format!("{name}.svg"));
        std::fs::write(&path, self.svg())
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn svg(&self) -> String {
        let values = || {
            self.groups
                .iter()
                .flat_map(|(_, values)| values)
                .copied()
                .filter(|v| v.is_finite() && *v > 0.0)
        };
        // Whole decades; bars start a little below the smallest value, so that it is visible.
        let low = (values().fold(f64::INFINITY, f64::min) / 1.5).log10().floor();
        let high = values().fold(f64::NEG_INFINITY, f64::max).log10().ceil().max(low + 1.0);
        let x = |value: f64| LEFT + PLOT * (value.log10() - low) / (high - low);
        let top = 50.0 + 16.0 * self.series.len().div_ceil(3) as f64;
        let group = BAR * self.series.len() as f64 + 14.0;
        let bottom = top + group * self.groups.len() as f64;
        let (width, height) = (LEFT + PLOT + 70.0, bottom + 44.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{}</text>\n",
            escape(&self.title)
        );
        for (i, series) in self.series.iter().enumerate() {
            let (at, y) = (10.0 + (i % 3) as f64 * 330.0, 42.0 + (i / 3) as f64 * 16.0);
            let _ = writeln!(
                svg,
                "<rect x=\"{at}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>\
                 <text x=\"{}\" y=\"{y}\">{}</text>",
                y - 9.0,
                COLOURS[i % COLOURS.len()],
                at + 15.0,
                escape(series)
            );
        }
        for decade in low as i32..=high as i32 {
            let value = 10f64.powi(decade);
            let _ = writeln!(
                svg,
                "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
                 <text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"middle\">{value}</text>",
                x(value),
                bottom + 16.0
            );
        }
        for (i, (label, values)) in self.groups.iter().enumerate() {
            let y = top + group * i as f64 + 7.0;
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + BAR * values.len() as f64 / 2.0 + 4.0,
                escape(label)
            );
            for (j, value) in
                values.iter().enumerate().filter(|(_, value)| value.is_finite() && **value > 0.0)
            {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"9\">{}</text>",
                    y + BAR * j as f64,
                    x(*value) - LEFT,
                    BAR - 2.0,
                    COLOURS[j % COLOURS.len()],
                    x(*value) + 4.0,
                    y + BAR * j as f64 + 8.5,
                    short(*value)
                );
            }
        }
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{} (logarithmic)</text>\n</svg>",
            LEFT + PLOT / 2.0,
            bottom + 34.0,
            escape(&self.axis)
        );
        svg
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
