//! The comparison of digests of all memory, with the guest stopped on both sides, and what it will
//! probably take: of what memory holds now, or of what was sent and read back before.

use std::time::Duration;

use godwit_balloon::FreeHints;
use godwit_memory::{RamBlock, SEGMENT_PAGES};
use godwit_units::{PageCount, PageIndex};
use godwit_wire::Message;

use super::PEER;
use super::fault::Fault;
use super::session::Session;
use crate::digests::{self, CHUNK_PAGES};
use crate::report::Place;
use crate::vm::SourceVm;
use crate::{EngineError, limits};

/// What the comparison takes.
pub(super) struct Cost {
    wanted: bool,
    /// The digest of a page, once it was measured.
    page: Option<Duration>,
}

impl Cost {
    /// Of a comparison, if one is `wanted`.
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, page: None }
    }

    /// How long it will take: both sides compute their digests at once.
    pub(super) fn expected(&mut self, ram: &[RamBlock]) -> Result<Duration, EngineError> {
        if !self.wanted {
            return Ok(Duration::ZERO);
        }
        let page = match self.page {
            Some(page) => page,
            None => *self.page.insert(digests::cost_of_page(ram)?),
        };
        let present: PageCount = ram.iter().map(RamBlock::allocated).sum::<Result<_, _>>()?;
        Ok(page.mul_f64(present.0 as f64))
    }
}

/// Compares the digests of `ram` with the destination's; of pages that were left out (`free`) the
/// destination has zeros.
pub(super) fn compare(
    session: &mut Session,
    vm: &dyn SourceVm,
    ram: &[RamBlock],
    free: Option<&FreeHints>,
) -> Result<(), EngineError> {
    session.say(&Message::DigestRequest)?;
    let mut own = Vec::new();
    for (number, block) in ram.iter().enumerate() {
        // What was left out is zero at the destination, so it has to count as zero here.
        let zeroed = |run, zero: &mut dyn FnMut(PageIndex)| {
            if let Some(hints) = free {
                hints.skipped(number, run, zero);
            }
        };
        let (all, interrupt) = (0..digests::chunks(block.pages()), session.interrupt());
        let digests = digests::digests(block, all, interrupt, zeroed)?;
        let place = Place { block: block.name().to_owned(), disk: false, offset: 0 };
        own.push((place, digests.ok_or(EngineError::Interrupted)?));
    }
    compare_with(session, vm, own, PageCount(CHUNK_PAGES))
}

/// Compares the digests `own`, one for each segment of `ram` in order, of what was sent with the
/// destination's of what it has read back; and those of `disks`, with their names.
pub(super) fn compare_sent(
    session: &mut Session,
    vm: &dyn SourceVm,
    ram: &[RamBlock],
    own: &[u128],
    disks: Vec<(String, Vec<u128>)>,
) -> Result<(), EngineError> {
    session.say(&Message::DigestRequest)?;
    let mut rest = own;
    let by_block = ram.iter().map(|block| {
        let segments = block.pages().0.div_ceil(SEGMENT_PAGES) as usize;
        let (first, others) = rest.split_at(segments.min(rest.len()));
        rest = others;
        (Place { block: block.name().to_owned(), disk: false, offset: 0 }, first.to_vec())
    });
    let of_disks = |(block, own)| (Place { block, disk: true, offset: 0 }, own);
    let own = by_block.chain(disks.into_iter().map(of_disks)).collect();
    compare_with(session, vm, own, PageCount(SEGMENT_PAGES))
}

/// Compares `own` digests, of RAM blocks and disks, of chunks of this size with the destination's,
/// which were asked for.
fn compare_with(
    session: &mut Session,
    vm: &dyn SourceVm,
    mut own: Vec<(Place, Vec<u128>)>,
    size: PageCount,
) -> Result<(), EngineError> {
    if session.made_up().is(Fault::WrongDigest) {
        own[0].1[0] ^= 1;
    }
    let expected: u64 = own.iter().map(|(_, digests)| digests.len() as u64).sum();
    let mut first_difference = None;
    let (mut seen, mut differing) = (0, 0);
    // The destination sends them in order, so that each is seen once.
    let mut next = (0usize, 0usize);
    while seen < expected {
        let what = "the destination's digests";
        let (block, first, theirs) =
            session.await_message(vm, what, limits::ANSWER, |message| match message {
                Message::Digests { block, first, digests } => {
                    Some((*block, *first, digests.clone()))
                }
                _ => None,
            })?;
        let fits = (block as usize, first as usize) == next
            && !theirs.is_empty()
            && next.1 + theirs.len() <= own[next.0].1.len();
        if !fits {
            let what = "it sent digests that nobody asked for".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        for (chunk, digest) in theirs.iter().enumerate().map(|(i, digest)| (next.1 + i, digest)) {
            if own[next.0].1[chunk] != *digest {
                differing += 1;
                first_difference.get_or_insert((next.0, chunk));
            }
        }
        seen += theirs.len() as u64;
        next.1 += theirs.len();
        while next.0 < own.len() && next.1 == own[next.0].1.len() {
            next = (next.0 + 1, 0);
        }
    }
    match first_difference {
        None => Ok(()),
        Some((block, chunk)) => Err(EngineError::Digest {
            size: size.bytes(),
            differing,
            chunks: expected,
            place: Place { offset: chunk as u64 * size.bytes().0, ..own.swap_remove(block).0 },
        }),
    }
}
