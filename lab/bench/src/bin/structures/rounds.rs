//! Taking times: contenders take turns, medians are taken over rounds; and tables in Markdown.

use std::hint::black_box;
use std::time::Instant;

use godwit_bench::report::median;
use godwit_bench::table::{markdown, short};

/// Contenders and their times, one for each round.
pub(crate) struct Rounds<'a> {
    contenders: Vec<(String, Contender<'a>)>,
    times: Vec<Vec<f64>>,
}

/// What a contender does, timing the part that counts; returns seconds, and a checksum all must
/// agree on.
type Contender<'a> = Box<dyn FnMut() -> (f64, u64) + 'a>;

/// Seconds that `f` takes, and what it returns.
pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = black_box(f());
    (start.elapsed().as_secs_f64(), result)
}

/// Prints a table with a row for each of `names`, a column for each of `columns`; in the cells
/// value × `unit` (ratio).
pub(crate) fn table_with_ratios(
    title: &str,
    names: &[String],
    columns: &[(String, Vec<(f64, f64)>)],
    unit: f64,
) {
    let head = std::iter::once("one thread").chain(columns.iter().map(|(name, _)| name.as_str()));
    let head: Vec<String> = head.map(str::to_owned).collect();
    let row = |(number, name): (usize, &String)| {
        let cells = columns.iter().map(|(_, cells)| {
            let (value, ratio) = cells[number];
            format!("{} ({})", short(value * unit), short(ratio))
        });
        std::iter::once(name.clone()).chain(cells).collect()
    };
    let rows: Vec<Vec<String>> = names.iter().enumerate().map(row).collect();
    markdown(title, &head, &rows);
}

impl<'a> Rounds<'a> {
    pub(crate) fn new() -> Self {
        Self { contenders: Vec::new(), times: Vec::new() }
    }

    /// Adds a contender and returns its number.
    pub(crate) fn add(
        &mut self,
        name: impl Into<String>,
        f: impl FnMut() -> (f64, u64) + 'a,
    ) -> usize {
        self.contenders.push((name.into(), Box::new(f)));
        self.times.push(Vec::new());
        self.contenders.len() - 1
    }

    /// Runs all contenders but the first `excepted` ones in `rounds` rounds, and checks that they
    /// agree.
    pub(crate) fn run(&mut self, rounds: usize, excepted: usize) {
        for _ in 0..rounds {
            let mut agreed = None;
            for (number, ((name, f), times)) in
                self.contenders.iter_mut().zip(&mut self.times).enumerate()
            {
                let (seconds, sum) = f();
                times.push(seconds);
                if number >= excepted {
                    assert_eq!(
                        *agreed.get_or_insert(sum),
                        sum,
                        "{name} found something else than the others"
                    );
                }
            }
        }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.contenders.iter().map(|(name, _)| name.as_str())
    }

    /// Seconds of contender `number`.
    pub(crate) fn seconds(&self, number: usize) -> f64 {
        median(&self.times[number])
    }

    /// Seconds of contender `number` in its best round.
    pub(crate) fn best(&self, number: usize) -> f64 {
        self.times[number].iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// How many times as long as `other` contender `number` takes.
    pub(crate) fn ratio(&self, number: usize, other: usize) -> f64 {
        let ratios: Vec<f64> = self.times[number]
            .iter()
            .zip(&self.times[other])
            .map(|(time, other)| time / other)
            .collect();
        median(&ratios)
    }
}
