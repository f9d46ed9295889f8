//! A disk as a place for pages.
//!
//! Invariant: a disk's pages come over its own channel only, which is checked, and inside the disk.
//! What a round brought is written before its end is told, so no older version of a page is written
//! after a newer one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_disk::{Disk, DiskError, DiskReader, DiskSink};
use godwit_units::{ByteCount, PageRun};
use godwit_wire::Content;

use super::channel::{PEER, PageSink};
use super::proof::Placed;
use crate::EngineError;
use crate::vm::DestinationVm;

/// Bytes that may be written and not be on stable storage yet. It bounds how long a flush takes,
/// for which the guest may wait in the end, and the source before that: no longer than
/// [`limits::WRITE`](crate::limits::WRITE) on a disk that writes 7 MB/s.
const UNSTABLE: ByteCount = ByteCount(128 << 20);

/// The round with the guest stopped, as the channels of disks and the conversation know it.
#[derive(Debug, Default)]
pub(super) struct LastRound {
    /// Disks of which it is on stable storage, and whose sinks are gone.
    ended: AtomicUsize,
    /// The longest flush since it was last asked for, in microseconds.
    flush: AtomicU64,
    disks_in_place: Mutex<Option<Instant>>,
}

impl LastRound {
    /// Of how many disks it has ended.
    pub(super) fn ended(&self) -> usize {
        self.ended.load(Ordering::Acquire)
    }

    /// A flush of a disk took so long.
    fn flushed(&self, time: Duration) {
        self.flush.fetch_max(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// The longest flush of a disk since the last call; zero when there was none.
    pub(super) fn take_flush(&self) -> Duration {
        Duration::from_micros(self.flush.swap(0, Ordering::Relaxed))
    }

    /// A disk was given all of its bytes; that of the last disk counts.
    fn in_place(&self) {
        *self.disks_in_place.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// When the last byte was handed to its disk: not yet written out, let alone flushed.
    pub(super) fn disks_in_place(&self) -> Option<Instant> {
        *self.disks_in_place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What reads each of so many disks of `vm` as it is now; `None` where it cannot.
pub(super) fn readers(
    vm: &mut dyn DestinationVm,
    disks: usize,
) -> Result<Option<Vec<Box<dyn DiskReader>>>, EngineError> {
    let readers = vm.disk_destination().map_or(Ok(Vec::new()), |vm| vm.read_disks());
    let readers = readers.map_err(EngineError::Vm)?;
    Ok(Some(readers).filter(|readers| readers.len() == disks))
}

/// What one channel of a disk fills.
pub(super) struct DiskPlace {
    /// Its number in frames.
    number: usize,
    disk: Disk,
    /// Gone after the last round, so that the machine may take the disk over.
    sink: Option<Box<dyn DiskSink>>,
    last: Arc<LastRound>,
    unstable: ByteCount,
    /// Where what was written is marked, so that it is read back.
    placed: Option<Arc<Placed>>,
    /// What is not marked yet: it may be under way.
    unmarked: Vec<PageRun>,
}

impl DiskPlace {
    /// For `disk`, which is number `number` in frames.
    pub(super) fn new(
        number: usize,
        disk: Disk,
        sink: Box<dyn DiskSink>,
        last: Arc<LastRound>,
        placed: Option<Arc<Placed>>,
    ) -> Self {
        let (sink, unstable) = (Some(sink), ByteCount::ZERO);
        Self { number, disk, sink, last, unstable, placed, unmarked: Vec::new() }
    }

    fn broke(&self, what: &str) -> EngineError {
        EngineError::Protocol {
            peer: PEER,
            what: format!("it sent {what} disk '{}'", self.disk.name),
        }
    }

    /// Calls the sink.
    fn with<T>(
        &mut self,
        call: impl FnOnce(&mut dyn DiskSink) -> Result<T, DiskError>,
    ) -> Result<T, EngineError> {
        match &mut self.sink {
            Some(sink) => call(sink.as_mut()).map_err(EngineError::Disk),
            None => Err(self.broke("pages behind the last round of")),
        }
    }

    fn flush(&mut self) -> Result<(), EngineError> {
        self.unstable = ByteCount::ZERO;
        let began = Instant::now();
        self.with(|sink| sink.flush(true))?;
        self.last.flushed(began.elapsed());
        self.mark();
        Ok(())
    }

    /// Waits until everything is written.
    fn write_out(&mut self) -> Result<(), EngineError> {
        self.with(|sink| sink.flush(false))?;
        self.mark();
        Ok(())
    }

    fn note(&mut self, run: PageRun) {
        if self.placed.is_none() {
            return;
        }
        match self.unmarked.last_mut() {
            Some(last) if last.end() == run.start => last.count += run.count,
            _ => self.unmarked.push(run),
        }
    }

    /// Marks what was written, behind the flush that has waited for it.
    fn mark(&mut self) {
        if let Some(placed) = &self.placed {
            self.unmarked.drain(..).for_each(|run| placed.mark(self.number, run));
        }
    }
}

impl PageSink for DiskPlace {
    fn check(&self, number: usize) -> Result<(), EngineError> {
        if number == self.number {
            Ok(())
        } else {
            Err(self.broke(&format!("pages of number {number} over the channel of")))
        }
    }

    fn name(&self, _: usize) -> String {
        format!("disk '{}'", self.disk.name)
    }

    fn place(
        &mut self,
        _: usize,
        run: PageRun,
        content: Content,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        if run.end().0 > self.disk.pages().0 {
            return Err(self.broke(&format!("{} from {} beyond the end of", run.count, run.start)));
        }
        match content {
            Content::Data => self.with(|sink| sink.write(run, bytes))?,
            Content::Zero => self.with(|sink| sink.zero(run))?,
        }
        self.note(run);
        self.unstable += ByteCount(bytes.len() as u64);
        if self.unstable >= UNSTABLE { self.flush() } else { Ok(()) }
    }

    fn end_round(&mut self, last: bool) -> Result<(), EngineError> {
        if !last {
            return self.write_out();
        }
        self.last.in_place();
        self.flush()?;
        self.sink = None;
        self.last.ended.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), EngineError> {
        if self.sink.is_some() { self.write_out() } else { Ok(()) }
    }

    /// What was told to be in place is flushed while the guest still runs: the last round has that
    /// much less to do.
    fn rest(&mut self) -> Result<(), EngineError> {
        if self.sink.is_some() && self.unstable > ByteCount::ZERO { self.flush() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use godwit_units::PAGE_SIZE;

    use super::*;

    /// Notes what it is asked to do.
    #[derive(Clone, Default)]
    struct Noted(Arc<Mutex<Vec<String>>>);

    impl Noted {
        fn note(&self, what: String) -> Result<(), DiskError> {
            self.0.lock().unwrap().push(what);
            Ok(())
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl DiskSink for Noted {
        fn write(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), DiskError> {
            self.note(format!("write {} {}", run.start.0, bytes.len() as u64 / PAGE_SIZE))
        }

        fn zero(&mut self, run: PageRun) -> Result<(), DiskError> {
            self.note(format!("zero {} {}", run.start.0, run.count.0))
        }

        fn flush(&mut self, durable: bool) -> Result<(), DiskError> {
            self.note(format!("flush {durable}"))
        }
    }

    fn place(noted: &Noted, last: &Arc<LastRound>) -> DiskPlace {
        // One sector more than nine pages.
        let disk = Disk { name: "vda".to_owned(), size: ByteCount(9 * PAGE_SIZE + 512) };
        DiskPlace::new(3, disk, Box::new(noted.clone()), Arc::clone(last), None)
    }

    #[test]
    fn a_disk_takes_its_own_pages_and_none_beyond_its_end() {
        let (noted, last) = (Noted::default(), Arc::default());
        let mut place = place(&noted, &last);
        place.check(3).unwrap();
        let error = place.check(2).unwrap_err().to_string();
        assert!(error.contains("pages of number 2 over the channel of disk 'vda'"), "{error}");
        let page = [1; PAGE_SIZE as usize];
        place.place(3, PageRun::new(9, 1), Content::Data, &page).unwrap();
        place.place(3, PageRun::new(0, 10), Content::Zero, &[]).unwrap();
        for run in [PageRun::new(10, 1), PageRun::new(9, 2)] {
            let error = place.place(3, run, Content::Zero, &[]).unwrap_err().to_string();
            assert!(error.contains("beyond the end of disk 'vda'"), "{error}");
        }
        assert_eq!(noted.take(), ["write 9 1", "zero 0 10"]);
    }

    #[test]
    fn a_round_is_written_before_it_is_told_and_the_last_one_is_stable() {
        let (noted, last) = (Noted::default(), Arc::default());
        let mut place = place(&noted, &last);
        let page = [1; PAGE_SIZE as usize];
        place.place(3, PageRun::new(1, 1), Content::Data, &page).unwrap();
        place.end_round(false).unwrap();
        assert_eq!(noted.take(), ["write 1 1", "flush false"]);
        place.rest().unwrap();
        place.rest().unwrap();
        assert_eq!(noted.take(), ["flush true"], "once");
        assert_eq!(last.disks_in_place(), None);
        assert_eq!(last.ended(), 0);
        place.end_round(true).unwrap();
        assert_eq!(noted.take(), ["flush true"]);
        assert_eq!(last.ended(), 1);
        assert!(place.end_round(true).is_err(), "there is one last round");
        assert_eq!(last.ended(), 1);
        assert!(last.disks_in_place().is_some());
        assert_eq!(Arc::strong_count(&noted.0), 1, "the machine may have the disk");
        assert!(place.place(3, PageRun::new(1, 1), Content::Data, &page).is_err());
        place.rest().unwrap();
    }

    #[test]
    fn little_is_left_to_flush() {
        let (noted, last) = (Noted::default(), Arc::default());
        let disk = Disk { name: "vda".to_owned(), size: ByteCount(1 << 30) };
        let mut place = DiskPlace::new(0, disk, Box::new(noted.clone()), last, None);
        let bytes = vec![1; 1 << 20];
        for index in 0..300 {
            place.place(0, PageRun::new(index * 256, 256), Content::Data, &bytes).unwrap();
        }
        assert_eq!(noted.take().iter().position(|call| call == "flush true"), Some(128));
    }
}
