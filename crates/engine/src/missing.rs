//! The list of pages that are still to come when the guest runs at the destination: as messages,
//! and as whoever hears these takes it in.

use godwit_bitmap::DirtyBitmap;
use godwit_memory::RamBlock;
use godwit_units::PageRun;
use godwit_wire::{MISSING_LIMIT, Message};

use crate::EngineError;
use crate::link::Peer;

/// What a peer says is missing, until it has said all.
pub(crate) struct MissingList {
    peer: Peer,
    /// The source's number of a block -> ours.
    order: Vec<usize>,
    missing: Vec<DirtyBitmap>,
    runs: usize,
    /// The source's number of the last block that was named.
    block: Option<u32>,
}

impl MissingList {
    /// Nothing of `blocks`, which the source has in `order`, was said yet by `peer`.
    pub(crate) fn new(peer: Peer, blocks: &[RamBlock], order: &[usize]) -> Self {
        Self {
            peer,
            order: order.to_vec(),
            missing: blocks.iter().map(|block| DirtyBitmap::new(block.pages())).collect(),
            runs: 0,
            block: None,
        }
    }

    /// Takes in what is missing of the source's block `block`.
    ///
    /// # Errors
    /// When there is no such block or page, it was named before, or there are too many runs.
    pub(crate) fn add(&mut self, block: u32, runs: &[PageRun]) -> Result<(), EngineError> {
        let peer = self.peer;
        let wrong = |what: String| EngineError::Protocol { peer, what };
        let own = self.order.get(block as usize).copied();
        let own = own.filter(|_| self.block.is_none_or(|before| before < block));
        let Some(own) = own else {
            return Err(wrong(format!("it said out of order what is missing of block {block}")));
        };
        self.block = Some(block);
        self.runs += runs.len();
        if self.runs > MISSING_LIMIT {
            let what = format!("it said that more than {MISSING_LIMIT} runs of pages are missing");
            return Err(wrong(what));
        }
        let missing = &mut self.missing[own];
        for run in runs {
            if run.end().0 > missing.len().0 {
                let (page, pages) = (run.end(), missing.len());
                return Err(wrong(format!("page {page} is missing of a block of {pages}")));
            }
            missing.set(*run);
        }
        Ok(())
    }

    /// What is missing of each of our blocks.
    pub(crate) fn into_missing(self) -> Vec<DirtyBitmap> {
        self.missing
    }
}

/// What is `missing`, the runs of each block, in `most` runs in all: where there are more, those
/// that are near each other are joined, and what lies between them is among it.
pub(crate) fn joined(mut missing: Vec<Vec<PageRun>>, most: usize) -> Vec<Vec<PageRun>> {
    let mut gap = 1;
    while missing.iter().map(Vec::len).sum::<usize>() > most {
        missing.iter_mut().for_each(|runs| join(runs, gap));
        gap *= 2;
    }
    missing
}

/// The messages that name what is `missing`, [`joined`].
pub(crate) fn messages(missing: Vec<Vec<PageRun>>, most: usize) -> Vec<Message> {
    let mut messages: Vec<Message> = (0..)
        .zip(joined(missing, most))
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

    #[test]
    fn a_list_names_blocks_in_order_and_pages_that_there_are() {
        let block = |pages| RamBlock::anonymous("ram", godwit_units::PageCount(pages)).unwrap();
        let blocks = [block(10), block(20)];
        let list = || MissingList::new("source", &blocks, &[1, 0]);
        let mut said = list();
        said.add(0, &[run(15, 5)]).unwrap();
        assert!(said.add(0, &[run(1, 1)]).is_err(), "it was named before");
        said.add(1, &[run(0, 2)]).unwrap();
        let missing = said.into_missing();
        assert_eq!(missing.iter().map(|pages| pages.count().0).collect::<Vec<_>>(), [2, 5]);
        assert!(list().add(0, &[run(15, 6)]).is_err() && list().add(2, &[]).is_err());
        let many: Vec<PageRun> = (0..=MISSING_LIMIT as u64).map(|at| run(at % 8, 1)).collect();
        assert!(list().add(0, &many).is_err());
    }

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
