//! What a destination gets wrong on purpose behind the checksum of a frame, so that it is seen that
//! this is found: `lab/faults` makes these defects, and docs/reliability.md has the table.
//!
//! Only a build with the feature `test-hooks` can be told of one; without it [`Slips`] has no size.
//! They strike pages that the guest checks: a guest whose own program is damaged dies, and can say
//! nothing of it.

use godwit_memory::{MemoryError, RamBlock};
use godwit_units::PageRun;

use super::fault::MadeUp;

/// What one channel of memory gets wrong.
#[derive(Debug)]
pub(super) struct Slips {
    #[cfg(feature = "test-hooks")]
    made: Option<made::Made>,
}

impl Slips {
    #[cfg(feature = "test-hooks")]
    pub(super) fn new(made_up: MadeUp) -> Self {
        Self { made: made_up.defect().map(made::Made::new) }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn new(_: MadeUp) -> Self {
        Self {}
    }

    /// Data is about to be placed in `run` of block `number`.
    #[cfg(feature = "test-hooks")]
    pub(super) fn before(
        &mut self,
        (number, block): (usize, &RamBlock),
        run: PageRun,
        bytes: &[u8],
    ) -> Result<(), MemoryError> {
        self.made.as_mut().map_or(Ok(()), |made| made.before((number, block), run, bytes))
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn before(
        &mut self,
        _: (usize, &RamBlock),
        _: PageRun,
        _: &[u8],
    ) -> Result<(), MemoryError> {
        Ok(())
    }

    /// It is placed. Other pages that were written besides are `touched`.
    #[cfg(feature = "test-hooks")]
    pub(super) fn after(
        &mut self,
        (number, block): (usize, &RamBlock),
        run: PageRun,
        bytes: &[u8],
        touched: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError> {
        let Some(made) = &mut self.made else { return Ok(()) };
        made.after((number, block), run, bytes, touched)
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn after(
        &mut self,
        _: (usize, &RamBlock),
        _: PageRun,
        _: &[u8],
        _: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError> {
        Ok(())
    }

    /// A round has ended, perhaps the last one.
    #[cfg(feature = "test-hooks")]
    pub(super) fn end_round(
        &mut self,
        blocks: &[RamBlock],
        last: bool,
        touched: &mut dyn FnMut(usize, PageRun),
    ) -> Result<(), MemoryError> {
        self.made.as_mut().map_or(Ok(()), |made| made.end_round(blocks, last, touched))
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn end_round(
        &mut self,
        _: &[RamBlock],
        _: bool,
        _: &mut dyn FnMut(usize, PageRun),
    ) -> Result<(), MemoryError> {
        Ok(())
    }

    /// The end of the round was told.
    #[cfg(feature = "test-hooks")]
    pub(super) fn rest(&mut self, blocks: &[RamBlock]) -> Result<(), MemoryError> {
        self.made.as_mut().map_or(Ok(()), |made| made.rest(blocks))
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn rest(&mut self, _: &[RamBlock]) -> Result<(), MemoryError> {
        Ok(())
    }
}

#[cfg(feature = "test-hooks")]
mod made {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use godwit_memory::{MemoryError, RamBlock};
    use godwit_units::{PAGE_SIZE, PageIndex, PageRun};

    use super::super::fault::Defect;
    use crate::stamped::{is_checked, tell_struck};

    const PAGE: usize = PAGE_SIZE as usize;
    /// What is placed late is so behind this time, in which the guest runs.
    const LATE: Duration = Duration::from_secs(2);
    /// Pages of which the first version is kept, at the most: 64 MiB.
    const KEPT: usize = 1 << 14;

    type Place = (usize, u64);

    #[derive(Debug)]
    pub(super) struct Made {
        defect: Defect,
        /// Pages that were chosen, in the order of their places.
        chosen: Vec<Place>,
        /// What pages held, to be put back.
        kept: BTreeMap<Place, Box<[u8]>>,
        /// The last round has ended.
        over: bool,
    }

    impl Made {
        pub(super) fn new(defect: Defect) -> Self {
            Self { defect, chosen: Vec::new(), kept: BTreeMap::new(), over: false }
        }

        pub(super) fn before(
            &mut self,
            (number, block): (usize, &RamBlock),
            run: PageRun,
            bytes: &[u8],
        ) -> Result<(), MemoryError> {
            if self.defect != Defect::RunAhead {
                return Ok(());
            }
            // What the pages of this round held before.
            let mut old = vec![0; PAGE];
            for (page, new) in (run.start.0..).zip(bytes.chunks_exact(PAGE)) {
                block.read(PageIndex(page), &mut old)?;
                let at = PageIndex(page);
                if is_checked(at, new) && is_checked(at, &old) && new != old {
                    self.kept.entry((number, page)).or_insert_with(|| old.clone().into());
                }
            }
            Ok(())
        }

        pub(super) fn after(
            &mut self,
            (number, block): (usize, &RamBlock),
            run: PageRun,
            bytes: &[u8],
            touched: &mut dyn FnMut(PageRun),
        ) -> Result<(), MemoryError> {
            let wanted = match self.defect {
                Defect::FlipBit => 1,
                Defect::SwapPages => 2,
                Defect::LateOldPage | Defect::RunAhead => 0,
            };
            for (page, new) in (run.start.0..).zip(bytes.chunks_exact(PAGE)) {
                let place = (number, page);
                if self.defect == Defect::LateOldPage
                    && is_checked(PageIndex(page), new)
                    && self.kept.len() < KEPT
                {
                    self.kept.entry(place).or_insert_with(|| new.into());
                }
                if is_checked(PageIndex(page), new)
                    && self.chosen.len() < wanted
                    && !self.chosen.contains(&place)
                {
                    self.chosen.push(place);
                    if self.chosen.len() == 2 {
                        self.swap(block)?;
                        self.chosen.iter().for_each(|(_, page)| touched(PageRun::new(*page, 1)));
                    }
                    if self.defect == Defect::SwapPages {
                        continue;
                    }
                }
                let Some(at) = self.chosen.iter().position(|chosen| *chosen == place) else {
                    continue;
                };
                match (self.defect, self.chosen.len()) {
                    (Defect::FlipBit, _) => {
                        let mut flipped = new.to_vec();
                        flipped[100] ^= 0x10;
                        block.write(PageIndex(page), &flipped)?;
                        tell_struck();
                    }
                    (Defect::SwapPages, 2) => {
                        // What has come here belongs there; what was here is put back.
                        let other = self.chosen[1 - at];
                        let back = self.kept.get(&place).cloned().unwrap_or_else(|| new.into());
                        block.write(PageIndex(other.1), new)?;
                        block.write(PageIndex(page), &back)?;
                        self.kept.insert(other, new.into());
                        touched(PageRun::new(other.1, 1));
                    }
                    _ => {}
                }
            }
            Ok(())
        }

        /// Both of those chosen are placed, for the first time together.
        fn swap(&mut self, block: &RamBlock) -> Result<(), MemoryError> {
            let [(number, one), (other_number, other)] = self.chosen[..] else { return Ok(()) };
            if number != other_number {
                self.chosen.pop();
                return Ok(());
            }
            let (mut first, mut second) = (vec![0; PAGE], vec![0; PAGE]);
            block.read(PageIndex(one), &mut first)?;
            block.read(PageIndex(other), &mut second)?;
            block.write(PageIndex(one), &second)?;
            block.write(PageIndex(other), &first)?;
            tell_struck();
            self.kept.insert((number, one), second.into());
            self.kept.insert((number, other), first.into());
            Ok(())
        }

        pub(super) fn end_round(
            &mut self,
            blocks: &[RamBlock],
            last: bool,
            touched: &mut dyn FnMut(usize, PageRun),
        ) -> Result<(), MemoryError> {
            match self.defect {
                Defect::RunAhead if !last => self.kept.clear(),
                Defect::RunAhead => {
                    // The pages of the last round are taken away again, and come late.
                    for ((number, page), held) in &mut self.kept {
                        let mut new = vec![0; PAGE].into_boxed_slice();
                        blocks[*number].read(PageIndex(*page), &mut new)?;
                        blocks[*number].write(PageIndex(*page), held)?;
                        *held = new;
                        touched(*number, PageRun::new(*page, 1));
                        tell_struck();
                    }
                }
                Defect::LateOldPage if last => {
                    let mut now = vec![0; PAGE];
                    for ((number, page), old) in &self.kept {
                        blocks[*number].read(PageIndex(*page), &mut now)?;
                        if is_checked(PageIndex(*page), &now) && now[..] != old[..] {
                            blocks[*number].write(PageIndex(*page), old)?;
                            touched(*number, PageRun::new(*page, 1));
                            tell_struck();
                            break;
                        }
                    }
                    self.kept.clear();
                }
                _ => {}
            }
            self.over = last;
            Ok(())
        }

        pub(super) fn rest(&mut self, blocks: &[RamBlock]) -> Result<(), MemoryError> {
            if self.defect == Defect::RunAhead && self.over {
                std::thread::sleep(LATE);
                for ((number, page), new) in std::mem::take(&mut self.kept) {
                    blocks[number].write(PageIndex(page), &new)?;
                }
            }
            Ok(())
        }
    }
}
