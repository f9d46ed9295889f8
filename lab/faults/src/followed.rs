//! Faults while the memory of a guest follows it (post-copy): godwits that are killed, and links
//! that are cut, at random moments; and the same commands once more.
//!
//! Some of the guests have a copy of what they lack in a third place: the host that they left may
//! end, too.
//!
//! Keeps three promises: a fault counts as one of post-copy only where pages were missing when it
//! struck; behind each move exactly one side has the guest, which has found no damage, and nothing
//! of godwit's is left but, where the source was lost, a `godwit receive` that waits two minutes
//! for it, and its record; and where the source's memory is in a file, which stays as it was when
//! the guest stopped there, each page that came behind it is compared with that, and these are all
//! that were missing but those that the guest gave back before they had come. Anonymous memory ends
//! with its source, before anybody could compare.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fastrand::Rng;
use godwit_e2e::{
    LIMIT, Pair, Third, await_quit, check_moved, check_no_userfaultfd, check_untouched,
    follow_records, guardian_of, recover_knows,
};
use godwit_fingerprints::Key;
use godwit_testbed::{Backend, Link, Movable, Running, VmConfig};
use godwit_units::{PAGE_SIZE, PageIndex};
use rustix::process::Signal;
use serde_json::Value;

/// So slow that the memory of a small guest takes a few seconds.
const SLOW: [&str; 7] =
    ["--max-bandwidth", "60MiB/s", "--compression", "none", "--reconnect", "60s", "--postcopy"];
/// When guests leave: at once, or behind a first pass, of which what was written since is missing.
pub(crate) const WHEN: [&str; 4] = ["now", "now", "now", "after 1"];
/// From the beginning of a migration, or from the fault before, to the next one, at the most.
pub(crate) const BETWEEN: Duration = Duration::from_millis(900);
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// What befalls a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `godwit migrate` is killed.
    KillMigrate,
    /// `godwit receive` is killed.
    KillReceive,
    /// Both are.
    KillBoth,
    /// The link is cut, for so long.
    Cut(Duration),
    /// The source's host is gone: its VM is killed, and `godwit migrate`.
    LoseSource,
}

/// Faults that struck while pages were missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Kills of `migrate`, and of `receive`.
    pub kills: [u32; 2],
    /// Cuts of the link.
    pub cuts: u32,
    /// Sources that were lost.
    pub lost: u32,
    /// Faults that struck before or behind.
    pub others: u32,
    /// Moves, and guests that stayed because a fault came before they had left.
    pub moves: u32,
    /// The same.
    pub stayed: u32,
    /// Pages that came behind a guest, and were compared with its source's memory.
    pub compared: u64,
    /// Guests of which that are all pages that were missing when they began to run.
    pub whole: u32,
}

impl Counts {
    /// Cuts `link` for so long, which counts as a cut where pages `lack`.
    pub(crate) fn cut(&mut self, link: &Link, time: Duration, lack: bool) {
        link.cut();
        std::thread::sleep(time);
        link.mend();
        *if lack { &mut self.cuts } else { &mut self.others } += 1;
    }

    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.kills = [0, 1].map(|side| self.kills[side] + other.kills[side]);
        self.cuts += other.cuts;
        self.lost += other.lost;
        self.others += other.others;
        self.moves += other.moves;
        self.stayed += other.stayed;
        self.compared += other.compared;
        self.whole += other.whole;
    }

    /// What came behind a guest was compared with the memory that it left in `ram`.
    pub(crate) fn compare(&mut self, placed: &Placed, ram: &File) -> anyhow::Result<()> {
        let compared = placed.compare(ram)?;
        self.compared += compared;
        self.whole += u32::from(compared > 0);
        Ok(())
    }
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A godwit is killed.
    Kill,
    /// The link is cut.
    Cut,
    /// The source is lost, of a guest that has a copy.
    Lose,
}

/// A fault of one kind: cuts of one to thirty seconds, as many short ones as long ones by their
/// logarithm.
pub fn draw(kind: Kind, rng: &mut Rng) -> Fault {
    match kind {
        Kind::Kill => [Fault::KillMigrate, Fault::KillReceive, Fault::KillBoth][rng.usize(..3)],
        Kind::Cut => Fault::Cut(Duration::from_secs_f64(30f64.powf(rng.f64()))),
        Kind::Lose => Fault::LoseSource,
    }
}

/// A move in which faults strike.
struct Move<'a> {
    pair: &'a mut Pair,
    address: String,
    link: Link,
    migrate: Option<Running>,
    receive: Option<Running>,
    counts: Counts,
    /// Where a copy is made of what is missing, if one is.
    third: Option<Third>,
    /// The source was lost.
    lost: bool,
    /// When the guest is to leave.
    when: &'static str,
    placed: Placed,
}

/// What `godwit receive` writes down of pages that come behind the guest: a directory, with a file
/// for each that was started.
pub(crate) struct Placed(Option<PathBuf>);

impl Placed {
    /// Of a guest of `config`, if its memory is in a file.
    fn of(config: &VmConfig) -> anyhow::Result<Self> {
        if config.backend == Backend::SharedFile { Self::new() } else { Ok(Self(None)) }
    }

    /// Of a guest whose memory is in a file.
    pub(crate) fn new() -> anyhow::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-placed-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory)?;
        Ok(Self(Some(directory)))
    }

    /// The files of those that were started.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let Some(directory) = &self.0 else { return Ok(Vec::new()) };
        let entries = std::fs::read_dir(directory)?;
        Ok(entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?)
    }

    /// The options of the next one.
    pub(crate) fn option(&self) -> anyhow::Result<Option<[String; 2]>> {
        let number = self.files()?.len();
        let file = self.0.as_ref().map(|directory| directory.join(number.to_string()));
        Ok(file.map(|file| ["--placed".to_owned(), file.display().to_string()]))
    }

    /// Compares all of it with the memory that the guest has left in `ram`; how many pages.
    ///
    /// # Errors
    /// When a page came otherwise than it was, or not at all.
    fn compare(&self, ram: &File) -> anyhow::Result<u64> {
        let came = self.came()?;
        let key = Key::new(0);
        let mut bytes = vec![0; PAGE_SIZE as usize];
        for (page, print) in &came.pages {
            ram.read_exact_at(&mut bytes, PageIndex(*page).offset())?;
            let as_it_was = key.page(&bytes).word() == *print;
            ensure!(as_it_was, "page {page} came otherwise than it was at the source");
        }
        came.check_whole()?;
        Ok(came.pages.len() as u64)
    }

    /// What is written there, once all has come: whoever waits for a source that is lost says so a
    /// moment after the guest has its last page.
    fn came(&self) -> anyhow::Result<Came> {
        let until = Instant::now() + LIMIT;
        loop {
            let mut came = Came::default();
            for number in 0..self.files()?.len() {
                let file = self.0.as_ref().map(|directory| directory.join(number.to_string()));
                let records = std::fs::read(file.context("no directory")?)?;
                // Whoever was killed may have left a part of the last one.
                let words = records.as_chunks::<16>().0.iter().map(|record| {
                    let word =
                        |at| u64::from_le_bytes(std::array::from_fn(|byte| record[at + byte]));
                    [word(0), word(8)]
                });
                words.for_each(|record| came.take(record));
            }
            if came.is_told() || Instant::now() >= until {
                return Ok(came);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// The bit of a record that tells of pages that are missing, and what one begins with that says
/// that nothing is missing any more (`write_placed` of the engine).
const MISSING: u64 = 1 << 63;
const ALL: u64 = u64::MAX;

/// What `godwit receive` has written down.
#[derive(Debug, Default)]
struct Came {
    /// Pages that were missing when the guest began to run; another godwit lacks no others.
    missing: BTreeSet<u64>,
    /// Pages that came, as often as they did, and the words of their fingerprints.
    pages: BTreeSet<(u64, u64)>,
    /// How many the guest gave back before they had come, once nothing is missing any more.
    given_back: Option<u64>,
}

impl Came {
    fn take(&mut self, record: [u64; 2]) {
        match record {
            [ALL, given_back] => self.given_back = Some(given_back),
            [first, count] if first & MISSING != 0 => {
                let first = first & !MISSING;
                self.missing.extend(first..first + count);
            }
            [page, print] => {
                self.pages.insert((page, print));
            }
        }
    }

    /// Whether all is told, or nothing was missing.
    fn is_told(&self) -> bool {
        self.missing.is_empty() || self.given_back.is_some()
    }

    /// Each page that was missing has come, but for as many as the guest gave back, and no other.
    fn check_whole(&self) -> anyhow::Result<()> {
        ensure!(self.is_told(), "nobody said that all has come that was missing");
        let came: BTreeSet<u64> = self.pages.iter().map(|(page, _)| *page).collect();
        let unasked: Vec<_> = came.difference(&self.missing).take(4).collect();
        ensure!(unasked.is_empty(), "pages {unasked:?} and others came, and were not missing");
        let never: Vec<_> = self.missing.difference(&came).collect();
        let given_back = self.given_back.unwrap_or_default();
        ensure!(
            never.len() as u64 <= given_back,
            "{} pages never came, {:?} among them; the guest gave back {given_back}",
            never.len(),
            &never[..never.len().min(4)]
        );
        Ok(())
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Some(directory) = &self.0 {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

/// Moves a guest of `config` while `faults` strike, one after the other.
///
/// # Errors
/// What is not as it should be.
pub fn run(config: &VmConfig, faults: &[Fault], rng: &mut Rng) -> anyhow::Result<Counts> {
    let mut pair = Pair::start(config)?;
    let third = faults.contains(&Fault::LoseSource).then(Third::new).transpose()?;
    let safe = third.as_ref().map(Third::option);
    let (when, placed) = (WHEN[rng.usize(..WHEN.len())], Placed::of(config)?);
    let own = placed.option()?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &options(&own, &safe))?;
    let link = Link::to(&address)?;
    let leaving = [&SLOW[..], &[when]].concat();
    let migrate = pair.godwit.migrate(&pair.source, link.address(), &words(&leaving, &safe))?;
    let mut one = Move {
        pair: &mut pair,
        address,
        link,
        migrate: Some(migrate),
        receive: Some(receive),
        counts: Counts::default(),
        third,
        lost: false,
        when,
        placed,
    };
    if when != WHEN[0] {
        // What comes before the guest leaves is not what this is about.
        let until = Instant::now() + LIMIT;
        while !one.runs_there()? && !one.is_over()? {
            ensure!(Instant::now() < until, "the guest does not leave: {}", one.words());
            std::thread::sleep(LOOK);
        }
    }
    for fault in faults {
        std::thread::sleep(BETWEEN.mul_f64(rng.f64()));
        if one.is_over()? {
            break;
        }
        one.strike(*fault)?;
    }
    one.settle()
}

/// `own` options of a side, and those of both for a copy.
pub(crate) fn words<'a>(own: &[&'a str], safe: &'a Option<[String; 2]>) -> Vec<&'a str> {
    let safe = safe.iter().flatten().map(String::as_str);
    own.iter().copied().chain(safe).collect()
}

/// The same of the destination.
fn options<'a>(own: &'a Option<[String; 2]>, safe: &'a Option<[String; 2]>) -> Vec<&'a str> {
    let own: Vec<&str> = own.iter().flatten().map(String::as_str).collect();
    words(&own, safe)
}

impl Move<'_> {
    /// Whether pages are missing: the record by which another godwit fetches them is there.
    fn lacks(&self) -> bool {
        follow_records(self.pair)[1] > 0
    }

    /// Whether the source knows that the guest runs there: it may be lost.
    fn runs_there(&mut self) -> anyhow::Result<bool> {
        match &self.migrate {
            Some(migrate) => Ok(migrate.lines().iter().any(|line| line["stage"] == "post-copy")),
            None => Ok(self.known()? == "follows"),
        }
    }

    fn is_over(&mut self) -> anyhow::Result<bool> {
        if self.lost {
            // It goes when nothing is missing; the record stays for a source that may come back.
            return Ok(self.third.as_ref().map_or(Ok(0), Third::files)? == 0);
        }
        // One that was killed may have left something to do.
        let ended = self.migrate.as_ref().is_some_and(Running::has_ended);
        // `recover` waits for the monitor, so it is asked only where nobody is at work.
        let stayed = self.migrate.is_none() && self.known()? == "runs";
        Ok(ended || stayed || !self.pair.source.is_alive())
    }

    fn strike(&mut self, fault: Fault) -> anyhow::Result<()> {
        if fault == Fault::LoseSource && (self.lost || !self.runs_there()?) {
            // A guest that has not left is lost with its VM, whoever moves it.
            return Ok(());
        }
        // Where the source is lost nobody uses the link.
        let lacks = self.lacks() && !(self.lost && matches!(fault, Fault::Cut(_)));
        let kills = match fault {
            Fault::LoseSource => {
                self.pair.source.kill();
                self.lost = true;
                let counted = if lacks { &mut self.counts.lost } else { &mut self.counts.others };
                *counted += 1;
                [true, false]
            }
            Fault::KillMigrate => [true, false],
            Fault::KillReceive => [false, true],
            Fault::KillBoth => [true, true],
            Fault::Cut(time) => {
                self.counts.cut(&self.link, time, lacks);
                [false, false]
            }
        };
        for (side, killed) in kills.into_iter().enumerate() {
            let godwit = if side == 0 { &mut self.migrate } else { &mut self.receive };
            let Some(killed) = godwit.take_if(|_| killed) else { continue };
            let alive = !killed.has_ended() && killed.signal(Signal::KILL).is_ok();
            drop(killed.wait(LIMIT)?);
            match alive {
                true if fault == Fault::LoseSource => {}
                true if lacks => self.counts.kills[side] += 1,
                true => self.counts.others += 1,
                false => {}
            }
        }
        if kills != [false; 2] {
            self.await_guardians()?;
            self.go_on()?;
        }
        Ok(())
    }

    /// Types the same commands again, where the guest has left.
    fn go_on(&mut self) -> anyhow::Result<()> {
        if self.receive.is_none() && self.lacks() && self.pair.destination.is_alive() {
            let there = &self.pair.destination;
            let safe = self.third.as_ref().map(Third::option);
            let own = self.placed.option()?;
            let options = options(&own, &safe);
            let (receive, _) = self.pair.godwit.receive_on(&self.address, there, &options)?;
            self.receive = Some(receive);
        }
        if self.migrate.is_none()
            && matches!(self.known()?.as_str(), "follows" | "leaves")
            && self.receive.is_some()
        {
            let safe = self.third.as_ref().map(Third::option);
            let leaving = [&SLOW[..], &[self.when]].concat();
            let (to, options) = (self.link.address(), words(&leaving, &safe));
            let migrate = self.pair.godwit.migrate(&self.pair.source, to, &options)?;
            self.migrate = Some(migrate);
        }
        Ok(())
    }

    /// What `godwit recover` knows of the source.
    fn known(&mut self) -> anyhow::Result<String> {
        if !self.pair.source.is_alive() {
            return Ok("gone".to_owned());
        }
        let vm = self.pair.source.vm_name();
        recover_knows(&self.pair.godwit, &vm).map(|(known, _)| known)
    }

    /// No more faults: it has to come to an end by itself, or by what docs/recovery.md says.
    fn settle(mut self) -> anyhow::Result<Counts> {
        let until = Instant::now() + LIMIT;
        // A destination that never got to run the guest is gone with its guardian.
        while !self.is_over()? && self.pair.destination.is_alive() {
            self.go_on()?;
            ensure!(Instant::now() < until, "it does not end: {}", self.words());
            std::thread::sleep(LOOK);
        }
        if self.lost {
            let words = self.words();
            return self.saved().context(words);
        }
        if !self.pair.destination.is_alive() || self.known()? == "runs" {
            return self.stayed();
        }
        let words = self.words();
        let Some(migrate) = self.migrate.take() else {
            // It was killed when its work was done: its QEMU has ended, and nobody else ends that.
            return self.arrived().context(words);
        };
        let migrate = migrate.wait(LIMIT)?;
        let receive = self.receive.take().context("nobody fetches it any more")?.wait(LIMIT * 2)?;
        let told = || format!("{words}; {} {}", migrate.last(), receive.last());
        ensure!(migrate.status.success() && receive.status.success(), "{}", told());
        check_moved(self.pair, &migrate).with_context(told)?;
        ensure!(!self.lacks(), "a record is left");
        check_no_userfaultfd(self.pair.destination.pid())?;
        await_quit(&mut self.pair.source)?;
        self.moved()
    }

    /// The guest is at the destination, whole.
    fn moved(mut self) -> anyhow::Result<Counts> {
        if self.placed.0.is_some() {
            let ram = File::open(self.pair.source.ram_file()).context("no memory of the source")?;
            self.counts.compare(&self.placed, &ram)?;
        }
        self.counts.moves += 1;
        Ok(self.counts)
    }

    /// The source was lost, and all that was missing has come, from it or from the copy.
    fn saved(mut self) -> anyhow::Result<Counts> {
        let there = &mut self.pair.destination;
        // The source may have removed the copy, just before it was lost.
        let until = Instant::now() + LIMIT;
        while let Err(stays) = check_no_userfaultfd(there.pid()) {
            ensure!(Instant::now() < until, "{stays:#}");
            std::thread::sleep(LOOK);
        }
        if let Some(receive) = self.receive.take() {
            let hurt = |line: &Value| line["event"] == "copy" && !line["why"].is_null();
            let hurt = receive.lines().into_iter().find(hurt);
            ensure!(hurt.is_none(), "{hurt:?}");
            if receive.has_ended() {
                let ended = receive.wait(LIMIT)?;
                ensure!(ended.status.success(), "{}", ended.last());
            }
        }
        ensure!(there.status()? == "running", "the guest does not run at the destination");
        there.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!(there.bugs().is_empty(), "{:?}", there.bugs());
        self.moved()
    }

    /// The source has ended, and `migrate` was killed just then.
    fn arrived(mut self) -> anyhow::Result<Counts> {
        ensure!(!self.pair.source.is_alive(), "nobody sends what is missing");
        // It is there for two minutes for a source that does not know that it is over.
        let receive = self.receive.take().context("nobody fetches it any more")?;
        let receive = receive.wait(LIMIT * 2)?;
        ensure!(receive.status.success(), "{}", receive.last());
        ensure!(!self.lacks(), "a record is left");
        let there = &mut self.pair.destination;
        ensure!(there.status()? == "running", "the guest does not run at the destination");
        there.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!(there.bugs().is_empty(), "{:?}", there.bugs());
        self.moved()
    }

    /// The guest never ran at the destination.
    fn stayed(mut self) -> anyhow::Result<Counts> {
        if let Some(migrate) = self.migrate.take() {
            // One that does not know it asks for ever.
            let until = Instant::now() + Duration::from_secs(10);
            while !migrate.has_ended() && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
            if !migrate.has_ended() {
                migrate.signal(Signal::INT)?;
            }
            let ended = migrate.wait(LIMIT)?;
            ensure!(!ended.status.success(), "{}", ended.last());
        }
        self.await_guardians()?;
        if self.known()? != "runs" {
            let vm = self.pair.source.vm_name();
            self.pair.godwit.done(&["recover", "--vm", &vm, "--guest", "here"])?;
        }
        if let Some(receive) = self.receive.take() {
            let _ = receive.signal(Signal::INT);
            drop(receive.wait(LIMIT)?);
        }
        check_untouched(&mut self.pair.source)?;
        self.counts.stayed += 1;
        Ok(self.counts)
    }

    /// Waits until the guardians of those that were killed have done what they can.
    fn await_guardians(&self) -> anyhow::Result<()> {
        let until = Instant::now() + LIMIT;
        let sides = [(&self.migrate, &self.pair.source), (&self.receive, &self.pair.destination)];
        for (_, vm) in sides.into_iter().filter(|(godwit, _)| godwit.is_none()) {
            while guardian_of(vm)?.is_some() {
                ensure!(Instant::now() < until, "a guardian stays");
                std::thread::sleep(LOOK);
            }
        }
        Ok(())
    }

    fn words(&self) -> String {
        let said = |godwit: &Option<Running>| {
            let last = |it: &Running| it.lines().last().cloned().unwrap_or_default();
            godwit
                .as_ref()
                .map_or("killed".to_owned(), |it| format!("{} {}", last(it), it.errors()))
        };
        format!("migrate: {}; receive: {}", said(&self.migrate), said(&self.receive))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of these records.
    fn judged(records: &[[u64; 2]]) -> Result<(), String> {
        let mut came = Came::default();
        records.iter().for_each(|record| came.take(*record));
        came.check_whole().map_err(|error| error.to_string())
    }

    #[test]
    fn a_move_is_whole_when_each_page_that_was_missing_has_come() {
        let missing = [MISSING | 7, 3];
        let all = [missing, [7, 1], [8, 1], [9, 1], [ALL, 0]];
        assert_eq!(judged(&all), Ok(()));
        // One that was killed: the next one lacks what is left, and a page may come twice.
        assert_eq!(judged(&[&all[..3], &[[MISSING | 8, 2]], &all[2..]].concat()), Ok(()));
        assert_eq!(judged(&[]), Ok(()), "nothing followed");

        let unsaid = judged(&all[..4]).unwrap_err();
        assert!(unsaid.contains("nobody said"), "{unsaid}");
        let lost = judged(&[missing, [7, 1], [9, 1], [ALL, 0]]).unwrap_err();
        assert!(lost.starts_with("1 pages never came, [8]"), "{lost}");
        assert_eq!(judged(&[missing, [7, 1], [9, 1], [ALL, 1]]), Ok(()), "it was given back");
        let other = judged(&[&all[..4], &[[6, 1]], &all[4..]].concat()).unwrap_err();
        assert!(other.contains("[6]"), "{other}");
    }
}
