//! The observer: looks at the guest's beacon from outside, in the RAM of both sides.
//!
//! Keeps three promises. It disturbs little: it sleeps between samples, maps one page of the
//! source's file and only for reading, and never fills a hole of the destination's file. It takes
//! the time around each look, and drops a look that was interrupted. And it believes only a beacon
//! that moves. What follows from the samples is `gap`'s and `trace`'s.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use godwit_memory::Mapping;
use godwit_stamp::beacon::{COUNTER_OFFSET, HEADER_LEN, is_beacon};
use godwit_units::{ByteCount, PAGE_SIZE};

use crate::gap::{GapFinder, Observation};
use crate::guest_ram::{GuestRam, OpenRam};
use crate::progress_trace::ProgressTrace;

const INTERVAL: Duration = Duration::from_micros(100);
/// A look that took longer was interrupted in the middle and says nothing about the time it was
/// taken.
const LOOK_LIMIT: Duration = Duration::from_micros(20);
const CHUNK: usize = 1 << 20;

/// Where in the RAM file the beacon is. It stays there for the life of the guest, on whatever host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeaconPlace {
    offset: u64,
}

impl BeaconPlace {
    /// Looks for the beacon in `ram`.
    ///
    /// # Errors
    /// When there is none, or several and none or more than one of them moves, or the memory cannot
    /// be read.
    pub fn find(ram: impl Into<GuestRam>) -> anyhow::Result<Self> {
        let ram = ram.into();
        let open = ram.open()?;
        let mut found = candidates(&open).with_context(|| format!("cannot search {ram:?}"))?;
        if found.len() > 1 {
            let before = counts(&open, &found)?;
            std::thread::sleep(Duration::from_millis(20));
            let after = counts(&open, &found)?;
            let mut moved = before.iter().zip(&after).map(|(before, after)| before != after);
            found.retain(|_| moved.next() == Some(true));
        }
        match found[..] {
            [offset] => Ok(Self { offset }),
            [] => Err(anyhow!("there is no beacon in {ram:?}: is the guest ready?")),
            _ => Err(anyhow!("there are {} beacons in {ram:?}", found.len())),
        }
    }
}

fn counts(ram: &OpenRam, offsets: &[u64]) -> io::Result<Vec<u64>> {
    let count = |offset: &u64| {
        let mut word = [0; 8];
        ram.read(offset + COUNTER_OFFSET as u64, &mut word)?;
        Ok(u64::from_le_bytes(word))
    };
    offsets.iter().map(count).collect()
}

/// The offsets of all pages that start like a beacon. Holes are passed over.
fn candidates(ram: &OpenRam) -> io::Result<Vec<u64>> {
    let (mut found, mut chunk, mut at) = (Vec::new(), vec![0; CHUNK], 0);
    while let Some(data) = ram.data(at)? {
        at = data.start;
        while at < data.end {
            let len = usize::try_from(data.end - at).map_or(CHUNK, |left| left.min(CHUNK));
            ram.read(at, &mut chunk[..len])?;
            let pages =
                (at..).step_by(PAGE_SIZE as usize).zip(chunk[..len].chunks(PAGE_SIZE as usize));
            found.extend(
                pages.filter(|(_, page)| is_beacon(&page[..HEADER_LEN])).map(|(offset, _)| offset),
            );
            at += len as u64;
        }
    }
    Ok(found)
}

/// Samples the beacon of a guest until told to stop.
#[derive(Debug)]
pub struct Observer {
    ending: Arc<AtomicBool>,
    started: Instant,
    thread: Option<JoinHandle<(Observation, ProgressTrace)>>,
}

impl Observer {
    /// Begins to sample the beacon at `place` in the RAM of both sides.
    ///
    /// # Errors
    /// When it cannot be opened or mapped.
    pub fn start(
        place: BeaconPlace,
        source: impl Into<GuestRam>,
        destination: impl Into<GuestRam>,
    ) -> anyhow::Result<Self> {
        let source = Departure::new(source.into().open()?, place)?;
        let destination = destination.into().open()?;
        let ending = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ending);
        let started = Instant::now();
        let sampling = move || sample(&source, &destination, place, started, &flag);
        let thread = std::thread::Builder::new().name("beacon".to_owned()).spawn(sampling)?;
        Ok(Self { ending, started, thread: Some(thread) })
    }

    /// What the times of gaps and of the course are counted from.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Stops sampling.
    ///
    /// # Errors
    /// When the sampling thread has failed.
    pub fn finish(self) -> anyhow::Result<Observation> {
        self.finish_with_course().map(|(seen, _)| seen)
    }

    /// Stops sampling, and tells also how the guest got on.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn finish_with_course(mut self) -> anyhow::Result<(Observation, ProgressTrace)> {
        self.ending.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the observer has ended before")?;
        let (seen, trace) =
            thread.join().map_err(|_| anyhow!("the observer's thread has panicked"))?;
        ensure!(seen.counted > 0, "the guest did not count at all while it was observed");
        Ok((seen, trace))
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
    }
}

/// The counter at the source: where it is in a file, its page is mapped.
enum Departure {
    Mapped(Mapping),
    Process { ram: OpenRam, at: u64 },
}

impl Departure {
    fn new(ram: OpenRam, place: BeaconPlace) -> anyhow::Result<Self> {
        match ram {
            OpenRam::File(file) => {
                let page = Mapping::read_only(&file, place.offset, ByteCount(PAGE_SIZE));
                Ok(Self::Mapped(page.context("cannot map the beacon page")?))
            }
            ram @ OpenRam::Process { .. } => {
                Ok(Self::Process { ram, at: place.offset + COUNTER_OFFSET as u64 })
            }
        }
    }

    /// Of a QEMU that has ended it is 0, as of a guest that does not count any more.
    fn count(&self) -> u64 {
        match self {
            Self::Mapped(page) => page.word(COUNTER_OFFSET),
            Self::Process { ram, at } => ram.word(*at).unwrap_or(0),
        }
    }
}

/// The destination's page is a hole until something is written there, and under post-copy once more
/// later. It is read and never mapped.
fn sample(
    source: &Departure,
    destination: &OpenRam,
    place: BeaconPlace,
    started: Instant,
    ending: &AtomicBool,
) -> (Observation, ProgressTrace) {
    // Both are refused without privilege, and only make the samples more even.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -20);
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
    let (mut finder, mut trace) = (GapFinder::default(), ProgressTrace::default());
    while !ending.load(Ordering::Relaxed) {
        let before = Instant::now();
        let there = destination.word(place.offset + COUNTER_OFFSET as u64);
        let here = source.count();
        if before.elapsed() <= LOOK_LIMIT {
            let at = before.duration_since(started);
            finder.sample(at, here, there);
            trace.note(at, there.map_or(here, |there| there.max(here)));
        }
        std::thread::sleep(INTERVAL);
    }
    (finder.observation(), trace)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use godwit_stamp::beacon::{check_word, magic};

    use super::*;

    struct TestFile(PathBuf);

    impl TestFile {
        fn new(name: &str) -> (Self, File) {
            let path =
                PathBuf::from(format!("/dev/shm/godwit-observer-{}-{name}", std::process::id()));
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)
                .unwrap();
            file.set_len(8 << 20).unwrap();
            (Self(path), file)
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    const PLACE: u64 = 5 << 20 | 3 << 12;

    fn light(file: &File, offset: u64) {
        file.write_all_at(&magic(), offset).unwrap();
        file.write_all_at(&check_word().to_le_bytes(), offset + 16).unwrap();
    }

    fn show(file: &File, count: u64) {
        file.write_all_at(&count.to_le_bytes(), PLACE + COUNTER_OFFSET as u64).unwrap();
    }

    #[test]
    fn a_beacon_is_found_only_at_the_start_of_a_page() {
        let (path, file) = TestFile::new("find");
        light(&file, 4096 + 512);
        assert!(
            BeaconPlace::find(&*path.0).unwrap_err().to_string().contains("is the guest ready")
        );
        light(&file, PLACE);
        assert_eq!(BeaconPlace::find(&*path.0).unwrap(), BeaconPlace { offset: PLACE });
    }

    #[test]
    fn of_two_beacons_the_moving_one_is_taken() {
        let (path, file) = TestFile::new("two");
        light(&file, 0);
        light(&file, PLACE);
        let counting = Arc::new(AtomicBool::new(true));
        let flag = Arc::clone(&counting);
        let guest = std::thread::spawn(move || {
            for count in 1.. {
                show(&file, count);
                std::thread::sleep(Duration::from_micros(100));
                if !flag.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let place = BeaconPlace::find(&*path.0);
        counting.store(false, Ordering::Relaxed);
        guest.join().unwrap();
        assert_eq!(place.unwrap(), BeaconPlace { offset: PLACE });
    }

    #[test]
    fn a_guest_that_moves_is_seen_to_move_and_its_hole_is_left_alone() {
        let ((here, source), (there, destination)) =
            (TestFile::new("here"), TestFile::new("there"));
        light(&source, PLACE);
        let count_on = |file: &File, counts: std::ops::Range<u64>| {
            for count in counts {
                show(file, count);
                std::thread::sleep(Duration::from_micros(200));
            }
        };
        let observer = Observer::start(BeaconPlace { offset: PLACE }, &*here.0, &*there.0).unwrap();
        count_on(&source, 1..50);
        let looked = GuestRam::from(&*there.0).open().unwrap();
        assert_eq!(looked.data(0).unwrap(), None);
        std::thread::sleep(Duration::from_millis(30));
        count_on(&destination, 50..100);

        let seen = observer.finish().unwrap();

        let gap = seen.switchover.unwrap();
        assert!(gap.at_most >= Duration::from_millis(30), "{gap:?}");
        assert!(!seen.ran_on_both);
    }
}
