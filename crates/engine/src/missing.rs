//! The list of pages that are still to come when the guest runs at the destination, as messages.

use godwit_units::PageRun;
use godwit_wire::Message;

/// The messages that name `missing`, the runs of each block, by `most` runs in all: where there are
/// more, those that are near each other are joined, and what lies between them is among it.
pub(crate) fn messages(mut missing: Vec<Vec<PageRun>>, most: usize) -> Vec<Message> {
    let mut gap = 1;
    while missing.iter().map(Vec::len).sum::<usize>() > most {
        missing.iter_mut().for_each(|runs| join(runs, gap));
        gap *= 2;
    }
    let mut messages: Vec<Message> = (0..)
        .zip(missing)
        .filter(|(_, runs)| !runs.is_empty())
        .map(|(block, runs)| Message::Missing { block, last: false, runs })
        .collect();
    match messages.last_mut() {
        Some(Message::Missing { last, .. }) => *last = true,
        _ => messages.push(Message::Missing { block: 0, last: true, runs: Vec::new() }),
    }
    messages
}

/// Joins runs with at most `gap` pages between them.
fn join(runs: &mut Vec<PageRun>, gap: u64) {
    runs.dedup_by(|next, before| {
        let joins = next.start.0 - before.end().0 <= gap;
        if joins {
            *before = PageRun::new(before.start.0, next.end().0 - before.start.0);
        }
        joins
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> PageRun {
        PageRun::new(start, count)
    }

    #[test]
    fn nothing_is_named_by_one_message_without_runs() {
        let none = Message::Missing { block: 0, last: true, runs: Vec::new() };
        assert_eq!(messages(vec![Vec::new(), Vec::new()], 9), [none]);
    }

    #[test]
    fn the_last_block_with_anything_missing_says_so() {
        let said = messages(vec![vec![run(3, 1)], Vec::new(), vec![run(0, 2)], Vec::new()], 9);
        let first = Message::Missing { block: 0, last: false, runs: vec![run(3, 1)] };
        let second = Message::Missing { block: 2, last: true, runs: vec![run(0, 2)] };
        assert_eq!(said, [first, second]);
    }

    #[test]
    fn runs_that_are_near_are_joined_until_there_are_few_enough() {
        let missing = vec![vec![run(0, 1), run(2, 1), run(100, 5), run(110, 1)], vec![run(7, 1)]];
        let count = |most| -> (usize, Vec<PageRun>) {
            let said = messages(missing.clone(), most);
            let runs = said.into_iter().flat_map(|message| match message {
                Message::Missing { runs, .. } => runs,
                _ => Vec::new(),
            });
            let runs: Vec<PageRun> = runs.collect();
            (runs.len(), runs)
        };
        assert_eq!(count(5).0, 5);
        assert_eq!(count(4).1, [run(0, 3), run(100, 5), run(110, 1), run(7, 1)]);
        assert_eq!(count(3).1, [run(0, 3), run(100, 11), run(7, 1)]);
        assert_eq!(count(2).1, [run(0, 111), run(7, 1)]);
    }
}
