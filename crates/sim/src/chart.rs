//! One migration as a chart in SVG: dirty against sent for each round, throttle and the guest's
//! speed over time.
//!
//! Plain text without a library: a chart is a few rectangles and lines, and its source should diff
//! well.

use std::fmt::Write as _;

use crate::outcome::Outcome;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 70.0;
const PLOT: f64 = 800.0;
const HEIGHT: f64 = 130.0;
const GAP: f64 = 52.0;

/// Draws `outcomes`, each in a column of three plots over its own time.
#[must_use]
pub fn chart(title: &str, outcomes: &[(String, Outcome)]) -> String {
    let each = 2.0 * (HEIGHT + GAP);
    let height = 40.0 + each * outcomes.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{height:.0}\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{} (simulated)</text>\n",
        escape(title)
    );
    // All on one scale of time, so that they can be compared.
    let longest = outcomes.iter().map(|(_, outcome)| outcome.total).fold(0.1, f64::max);
    for (number, (name, outcome)) in outcomes.iter().enumerate() {
        let top = 56.0 + each * number as f64;
        data(&mut svg, name, outcome, longest, top);
        speeds(&mut svg, outcome, longest, top + HEIGHT + GAP);
    }
    svg.push_str("</svg>\n");
    svg
}

fn frame(svg: &mut String, label: &str, top: f64, most: &str, longest: f64) {
    let bottom = top + HEIGHT;
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{:.0}\">{}</text>\
         <rect x=\"{LEFT}\" y=\"{top:.0}\" width=\"{PLOT}\" height=\"{HEIGHT}\" \
         fill=\"none\" stroke=\"#ccc\"/>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{most}</text>\
         <text x=\"{:.0}\" y=\"{bottom:.0}\" text-anchor=\"end\">0</text>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{longest:.1} s</text>",
        top - 6.0,
        escape(label),
        LEFT - 6.0,
        top + 8.0,
        LEFT - 6.0,
        LEFT + PLOT,
        bottom + 14.0,
    );
}

fn data(svg: &mut String, name: &str, outcome: &Outcome, longest: f64, top: f64) {
    let most = outcome.rounds.iter().map(|row| row.sent.max(row.remaining)).fold(1.0, f64::max);
    let label = format!(
        "{name}: {:.1} s, downtime {:.0} ms, work lost {:.1} s. Each round: sent (blue), \
         left at its end (orange)",
        outcome.total,
        outcome.downtime * 1e3,
        outcome.lost_work
    );
    frame(svg, &label, top, &godwit_units::ByteCount(most as u64).to_string(), longest);
    for row in &outcome.rounds {
        let x = LEFT + PLOT * row.start / longest;
        let width = (PLOT * row.seconds / longest).max(1.0);
        for (value, colour, at, share) in
            [(row.sent, "#1b6ca8", x, 0.6), (row.remaining, "#e07a3f", x + width * 0.6, 0.4)]
        {
            let height = HEIGHT * value / most;
            let _ = writeln!(
                svg,
                "<rect x=\"{at:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"{height:.1}\" fill=\"{colour}\"/>",
                top + HEIGHT - height,
                (width * share - 0.3).max(0.4),
            );
        }
    }
}

fn speeds(svg: &mut String, outcome: &Outcome, longest: f64, top: f64) {
    frame(svg, "throttle (red), speed of the guest (green), stopped (grey)", top, "100 %", longest);
    let x = |at: f64| LEFT + PLOT * at / longest;
    let y = |share: f64| top + HEIGHT * (1.0 - share);
    for (colour, value) in [("#c0392b", 0), ("#4b8f5a", 1)] {
        let mut path = format!("M{:.1} {:.1}", x(0.0), y(f64::from(value)));
        for point in &outcome.points {
            let share = if value == 0 { point.throttle } else { point.speed };
            let _ = write!(path, " H{:.1} V{:.1}", x(point.at), y(share));
        }
        let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>");
    }
    if outcome.downtime > 0.0 {
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{HEIGHT}\" \
             fill=\"#888\" fill-opacity=\"0.5\"/>",
            x(outcome.total - outcome.downtime),
            (PLOT * outcome.downtime / longest).max(0.5)
        );
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
