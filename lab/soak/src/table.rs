//! A line for each VM while the soak runs.
//!
//! Keeps two promises: on a terminal the lines stay where they are and change; anywhere else there
//! is one line for each move, in the order in which moves end.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::report::{Row, Verdict};

/// No line is longer.
const WIDTH: usize = 79;

/// What is known of one VM.
#[derive(Clone, Debug, Default)]
struct Line {
    name: &'static str,
    moves: usize,
    /// Moves that were given up in good order.
    stayed: usize,
    struck: usize,
    failed: usize,
    downtime_ms: f64,
    worst_ms: f64,
    doing: String,
}

/// The lines of all VMs.
#[derive(Debug)]
pub struct Table {
    lines: Mutex<Vec<Line>>,
    live: bool,
    wanted: String,
}

impl Table {
    /// One for the VMs called `names`; `wanted` says what ends the soak.
    #[must_use]
    pub fn new(names: &[&'static str], wanted: String) -> Self {
        let line = |name: &&'static str| Line { name, ..Line::default() };
        let lines = Mutex::new(names.iter().map(line).collect());
        Self { lines, live: std::io::stdout().is_terminal(), wanted }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many moves each VM has made.
    #[must_use]
    pub fn moves(&self) -> Vec<usize> {
        self.lock().iter().map(|line| line.moves).collect()
    }

    /// How many moves of each VM came to an end, with the guest here or there.
    #[must_use]
    pub fn tries(&self) -> Vec<usize> {
        self.lock().iter().map(|line| line.moves + line.stayed).collect()
    }

    /// Says what the VM at `place` does.
    pub fn doing(&self, place: usize, what: &str) {
        if let Some(line) = self.lock().get_mut(place) {
            what.clone_into(&mut line.doing);
        }
    }

    /// Adds what came of a move of the VM at `place`.
    pub fn add(&self, place: usize, row: &Row) {
        let mut lines = self.lock();
        let total: usize = lines.iter().map(|line| line.moves).sum();
        let Some(line) = lines.get_mut(place) else { return };
        let mut total = total;
        match row.verdict {
            Verdict::Moved => (line.moves, total) = (line.moves + 1, total + 1),
            Verdict::Survived => line.struck += 1,
            Verdict::Failed => line.failed += 1,
            Verdict::Stayed => line.stayed += 1,
            Verdict::Skipped => {}
        }
        line.downtime_ms = row.downtime_ms;
        line.worst_ms = line.worst_ms.max(row.downtime_ms);
        if self.live && row.verdict != Verdict::Failed {
            return;
        }
        // Below the table, which is drawn anew behind it.
        println!("[{total}/{}] {}", self.wanted, row.words());
        if row.verdict == Verdict::Failed {
            println!("    {}\n    again: {}", row.evidence, row.repeat);
        }
    }

    /// Draws all lines, on a terminal; `again` where they stand there already.
    pub fn draw(&self, again: bool) {
        if !self.live {
            return;
        }
        let lines = self.lock();
        let mut text = String::new();
        if again {
            text.push_str(&format!("\x1b[{}A", lines.len() + 2));
        }
        for line in shown(&lines, &self.wanted) {
            text.push_str(&format!("\x1b[2K{line}\n"));
        }
        let _ = std::io::stdout().write_all(text.as_bytes());
    }
}

/// The lines as they are shown: a head, one for each VM, and a sum.
fn shown(lines: &[Line], wanted: &str) -> Vec<String> {
    let head = format!(
        "{:<19}{:>6}{:>8}{:>8}{:>10}{:>10}  {}",
        "VM", "moves", "faults", "failed", "last ms", "worst ms", "now"
    );
    let row = |line: &Line| {
        format!(
            "{:<19}{:>6}{:>8}{:>8}{:>10.1}{:>10.1}  {}",
            line.name,
            line.moves,
            line.struck,
            line.failed,
            line.downtime_ms,
            line.worst_ms,
            line.doing
        )
    };
    let sum = |of: fn(&Line) -> usize| lines.iter().map(of).sum::<usize>();
    let end = format!(
        "{:<19}{:>6}{:>8}{:>8}  of {wanted}",
        "all",
        sum(|line| line.moves),
        sum(|line| line.struck),
        sum(|line| line.failed)
    );
    let all = std::iter::once(head).chain(lines.iter().map(row)).chain([end]);
    all.map(|line| line.chars().take(WIDTH).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::row_for_tests;

    #[test]
    fn moves_faults_and_failures_are_counted_apart_in_lines_that_fit() {
        let table = Table::new(&["a", "b"], "500 moves".to_owned());
        table.add(0, &row_for_tests("a", Verdict::Moved));
        table.add(1, &row_for_tests("b", Verdict::Survived));
        table.add(1, &row_for_tests("b", Verdict::Failed));
        table.doing(1, &"long ".repeat(40));
        let lines = shown(&table.lock(), &table.wanted);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH));
        let numbers = |line: &str| line.split_whitespace().skip(1).take(3).collect::<String>();
        assert_eq!(
            lines[1..].iter().map(|line| numbers(line)).collect::<Vec<_>>(),
            ["100", "011", "111"]
        );
    }
}
