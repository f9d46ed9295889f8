//! Text laid out for a terminal: paragraphs that wrap, and tables whose least important columns go
//! first.
//!
//! Everything fits the narrow terminal, 80 columns, except a single word that is longer, such as a
//! path: that one stays whole, so that it can be copied. What is not a terminal counts as a narrow
//! one.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use crate::say;

/// The columns of the narrowest terminal that all is made for, and of whatever is none.
pub const NARROW: usize = 80;
/// Longer lines are hard to read.
const WIDEST: usize = 160;

/// How many columns lines to `stream` may have.
pub fn width(stream: &(impl AsFd + IsTerminal)) -> usize {
    if !stream.is_terminal() {
        return NARROW;
    }
    let size = rustix::termios::tcgetwinsize(stream.as_fd());
    // A terminal that does not know its size says 0.
    let columns = size.map_or(0, |size| usize::from(size.ws_col));
    if columns == 0 { NARROW } else { columns.clamp(20, WIDEST) }
}

/// How many lines `stream` shows at once; what is no terminal shows as many as a small one.
pub fn height(stream: &(impl AsFd + IsTerminal)) -> usize {
    let size = rustix::termios::tcgetwinsize(stream.as_fd());
    let rows = size.map_or(0, |size| usize::from(size.ws_row));
    if rows == 0 { 24 } else { rows }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// `text` behind `label`, in lines of at most `width` columns; all but the first are indented by
/// `indent`. Lines are ours to end: what does so in `text` is shown escaped.
pub fn wrap(label: &str, text: &str, indent: usize, width: usize) -> String {
    let text = say::line(text);
    let mut lines = vec![label.to_owned()];
    let mut begun = false;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let line = lines.last().map_or(0, |line| length(line));
        if begun && line + 1 + length(word) > width {
            lines.push(" ".repeat(indent) + word);
        } else if let Some(line) = lines.last_mut() {
            if begun {
                line.push(' ');
            }
            line.push_str(word);
        }
        begun = true;
    }
    lines.join("\n")
}

/// One column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    /// Its heading.
    pub head: &'a str,
    /// Whether its cells are numbers, which end below each other, or words, which begin there.
    pub number: bool,
    /// Where there is no room for all columns, those with the highest rank are left out first.
    pub rank: u8,
}

impl<'a> Column<'a> {
    /// A column of numbers.
    pub const fn number(head: &'a str, rank: u8) -> Self {
        Self { head, number: true, rank }
    }

    /// A column of words.
    pub const fn words(head: &'a str, rank: u8) -> Self {
        Self { head, number: false, rank }
    }

    /// `text` in this column, `width` wide.
    pub fn cell(&self, text: &str, width: usize) -> String {
        if self.number { format!("{text:>width$}") } else { format!("{text:<width$}") }
    }
}

/// Which of `columns` fit into `width` when each is as wide as `widths` says, with `gap` between
/// two.
pub fn fitting(columns: &[Column<'_>], widths: &[usize], gap: usize, width: usize) -> Vec<bool> {
    let mut shown = vec![true; columns.len()];
    loop {
        let count = shown.iter().filter(|shown| **shown).count();
        let sum: usize =
            widths.iter().zip(&shown).filter(|(_, shown)| **shown).map(|(width, _)| width).sum();
        if count <= 1 || sum + gap * (count - 1) <= width {
            return shown;
        }
        let least = (0..columns.len()).filter(|&i| shown[i]).max_by_key(|&i| columns[i].rank);
        shown[least.unwrap_or(0)] = false;
    }
}

/// A table with a heading. Each row has a cell for each of `columns`.
pub fn table(columns: &[Column<'_>], rows: &[Vec<String>], indent: usize, width: usize) -> String {
    let widths: Vec<usize> = (0..columns.len())
        .map(|i| {
            rows.iter().map(|row| length(&row[i])).max().unwrap_or(0).max(length(columns[i].head))
        })
        .collect();
    let shown = fitting(columns, &widths, 2, width.saturating_sub(indent));
    let heads: Vec<String> = columns.iter().map(|column| column.head.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&heads).chain(rows) {
        let cells: Vec<String> = (0..columns.len())
            .filter(|&i| shown[i])
            .map(|i| columns[i].cell(&row[i], widths[i]))
            .collect();
        text += &format!("{}{}\n", " ".repeat(indent), cells.join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paragraph_wraps_behind_its_label() {
        let text = wrap("label   ", "one two three four", 8, 18);
        assert_eq!(text, "label   one two\n        three four");
        let path = "/a/very/long/path/that/is/longer/than/the/line";
        assert_eq!(
            wrap("", &format!("see {path} there"), 2, 20),
            format!("see\n  {path}\n  there")
        );
        assert_eq!(wrap("only    ", "", 8, 18), "only    ");
    }

    #[test]
    fn a_narrow_table_leaves_out_what_matters_least() {
        let columns =
            [Column::words("name", 0), Column::number("detail", 2), Column::number("sum", 1)];
        let rows = vec![vec!["first".to_owned(), "1".to_owned(), "20".to_owned()]];
        assert_eq!(table(&columns, &rows, 0, 80), "name   detail  sum\nfirst       1   20\n");
        assert_eq!(table(&columns, &rows, 0, 12), "name   sum\nfirst   20\n");
        assert_eq!(table(&columns, &rows, 2, 5), "  name\n  first\n");
    }
}
