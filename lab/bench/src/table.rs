//! Tables whose columns are data: what stands over each, how wide it is, and what it shows of a
//! row.

/// A column of a table of rows `R`.
pub struct Column<R> {
    /// What stands over it.
    pub head: &'static str,
    /// In characters; what is longer is not cut.
    pub width: usize,
    /// What it shows of a row.
    pub cell: fn(&R) -> String,
}

/// A table: its columns. The first one is the name of a row and begins at the left, the others are
/// figures and end at the right.
pub struct Table<R: 'static>(pub &'static [Column<R>]);

impl<R> Table<R> {
    /// Prints what stands over the columns.
    pub fn print_head(&self) {
        println!("{}", self.line(|column| column.head.to_owned()));
    }

    /// Prints a row.
    pub fn print(&self, row: &R) {
        println!("{}", self.line(|column| (column.cell)(row)));
    }

    fn line(&self, text: impl Fn(&Column<R>) -> String) -> String {
        let cells = self.0.iter().enumerate().map(|(place, column)| {
            let (text, width) = (text(column), column.width);
            if place == 0 { format!("{text:<width$}") } else { format!("{text:>width$}") }
        });
        cells.collect::<Vec<_>>().join(" ")
    }
}

/// A figure with so many digits behind the point; one that is not known is a dash.
pub fn figure(value: f64, digits: usize) -> String {
    if value.is_nan() { "-".to_owned() } else { format!("{value:.digits$}") }
}

/// A figure with three significant digits or so, for where there is little room.
pub fn short(value: f64) -> String {
    match value {
        v if !v.is_finite() => "–".to_owned(),
        v if v >= 99.5 => format!("{v:.0}"),
        v if v >= 9.95 => format!("{v:.1}"),
        v if v >= 0.0995 => format!("{v:.2}"),
        v => format!("{v:.4}"),
    }
}

/// Prints a table in Markdown, columns aligned, where columns are known only when it runs.
pub fn markdown(title: &str, head: &[String], rows: &[Vec<String>]) {
    println!("\n### {title}\n");
    let width = |column: usize| {
        rows.iter().chain([&head.to_vec()]).map(|row| row[column].chars().count()).max()
    };
    let widths: Vec<usize> = (0..head.len()).map(|column| width(column).unwrap_or(0)).collect();
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(i, (cell, &width))| {
                    if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        println!("| {} |", cells.join(" | "));
    };
    line(head);
    println!(
        "|{}|",
        widths
            .iter()
            .enumerate()
            .map(|(i, width)| if i == 0 {
                "-".repeat(width + 2)
            } else {
                "-".repeat(width + 1) + ":"
            })
            .collect::<Vec<_>>()
            .join("|")
    );
    rows.iter().for_each(|row| line(row));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_at_the_left_and_figures_end_at_the_right() {
        const TABLE: Table<(&str, f64)> = Table(&[
            Column { head: "", width: 6, cell: |row| row.0.to_owned() },
            Column { head: "ms", width: 5, cell: |row| figure(row.1, 1) },
        ]);
        assert_eq!(TABLE.line(|column| column.head.to_owned()), "          ms");
        assert_eq!(TABLE.line(|column| (column.cell)(&("plain", 3.12))), "plain    3.1");
        assert_eq!(
            TABLE.line(|column| (column.cell)(&("a long name", f64::NAN))),
            "a long name     -"
        );
    }
}
