//! Memory of a machine made up whose pages come while its guest runs: the guest reads by
//! [`Coming::read`] and writes by [`Coming::write`], and waits there for what is not there yet.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use godwit_bitmap::DirtyBitmap;
use godwit_engine::vm::{ArrivingPages, VmError};
use godwit_memory::RamBlock;
use godwit_track::MissingMeasures;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

pub struct Coming {
    ram: Arc<Vec<RamBlock>>,
    state: Mutex<State>,
    changed: Condvar,
    pub finished: AtomicBool,
}

#[derive(Default)]
struct State {
    missing: Vec<DirtyBitmap>,
    asked: Vec<DirtyBitmap>,
    faults: VecDeque<(usize, PageIndex)>,
    measures: MissingMeasures,
}

impl Coming {
    /// `missing` of `ram` is thrown away.
    pub fn new(ram: &Arc<Vec<RamBlock>>, missing: Vec<DirtyBitmap>) -> Self {
        for (block, missing) in ram.iter().zip(&missing) {
            // What is here is not to be read: it would be seen.
            for page in missing.pages() {
                block.write(page, &[0xdd; PAGE_SIZE as usize]).unwrap();
            }
        }
        let asked = missing.iter().map(|pages| DirtyBitmap::new(pages.len())).collect();
        let state = Mutex::new(State { missing, asked, ..State::default() });
        let (changed, finished) = (Condvar::new(), AtomicBool::new(false));
        Self { ram: Arc::clone(ram), state, changed, finished }
    }

    /// Waits until the page is there.
    fn await_page(&self, block: usize, page: PageIndex) {
        let mut state = self.state.lock().unwrap();
        while state.missing[block].is_set(page) {
            if state.asked[block].set(PageRun::new(page.0, 1)).0 == 1 {
                state.measures.faults += 1;
                state.faults.push_back((block, page));
                self.changed.notify_all();
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    pub fn read(&self, block: usize, page: PageIndex) -> Vec<u8> {
        self.await_page(block, page);
        let mut bytes = vec![0; PAGE_SIZE as usize];
        self.ram[block].read(page, &mut bytes).unwrap();
        bytes
    }

    pub fn write(&self, block: usize, page: PageIndex, bytes: &[u8]) {
        self.await_page(block, page);
        self.ram[block].write(page, bytes).unwrap();
    }

    fn place_with(&self, block: usize, pages: PageRun, place: &dyn Fn(PageIndex)) -> PageCount {
        let mut state = self.state.lock().unwrap();
        let mut placed = PageCount::ZERO;
        for page in (pages.start.0..pages.end().0).map(PageIndex) {
            if state.missing[block].clear(PageRun::new(page.0, 1)).0 == 1 {
                place(page);
                placed += PageCount(1);
            }
        }
        state.measures.placed += placed.0;
        self.changed.notify_all();
        placed
    }
}

impl ArrivingPages for Coming {
    fn await_faults(
        &self,
        time: Duration,
        found: &mut dyn FnMut(usize, PageIndex),
    ) -> Result<(), VmError> {
        let mut state = self.state.lock().unwrap();
        if state.faults.is_empty() {
            state = self.changed.wait_timeout(state, time).unwrap().0;
        }
        let faults = std::mem::take(&mut state.faults);
        drop(state);
        faults.into_iter().for_each(|(block, page)| found(block, page));
        Ok(())
    }

    fn place(&self, block: usize, start: PageIndex, bytes: &[u8]) -> Result<PageCount, VmError> {
        let size = PAGE_SIZE as usize;
        let pages = PageRun::new(start.0, (bytes.len() / size) as u64);
        Ok(self.place_with(block, pages, &|page| {
            let at = (page.0 - start.0) as usize * size;
            self.ram[block].write(page, &bytes[at..at + size]).unwrap();
        }))
    }

    fn place_zeros(&self, block: usize, pages: PageRun) -> Result<PageCount, VmError> {
        Ok(self.place_with(block, pages, &|page| {
            self.ram[block].write(page, &[0; PAGE_SIZE as usize]).unwrap();
        }))
    }

    fn left(&self) -> PageCount {
        self.state.lock().unwrap().missing.iter().map(DirtyBitmap::count).sum()
    }

    fn next_run(&self, block: usize, from: PageIndex) -> Option<PageRun> {
        self.state.lock().unwrap().missing[block].next_run(from)
    }

    fn measures(&self) -> MissingMeasures {
        self.state.lock().unwrap().measures
    }

    fn finish(&self) -> Result<(), VmError> {
        assert!(!self.finished.swap(true, Ordering::SeqCst), "it is finished twice");
        Ok(())
    }
}
