//! Those who watch a migration: each is told, by a thread of its own, whenever something has
//! changed, and at last how it ended.
//!
//! Invariant: the migration waits for none of them. It leaves the last look here and goes on; who
//! reads slowly misses looks, and who does not read is given up.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_engine::report::Progress;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use crate::asked::VERSIONS;
use crate::events;
use crate::messages::Answer;

/// Lines about progress are no closer together.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// So many may watch one migration; each has a thread.
pub const MOST: usize = 16;
/// Those who watch are told the end within that, or not at all.
pub const LAST_WORDS: Duration = Duration::from_secs(1);
/// Who does not read for so long is given up.
const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// How often it is looked whether they are there still, where nothing changes.
const THERE: Duration = Duration::from_secs(1);

/// A migration as it is watched. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Watched(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Clone, Debug, Default)]
struct Now {
    /// How many looks there were, and the last one.
    looks: u64,
    progress: Option<Arc<Progress>>,
    /// How it ended.
    last: Option<Arc<Value>>,
    /// How many watch.
    watching: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who watches, as long as it is told.
struct Watcher(Arc<Shared>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.lock().watching -= 1;
        self.0.changed.notify_all();
    }
}

impl Watched {
    /// There was another look.
    pub fn see(&self, progress: &Progress) {
        let progress = Arc::new(progress.clone());
        let mut now = self.0.lock();
        now.looks += 1;
        let before = now.progress.replace(progress);
        drop(now);
        drop(before);
        self.0.changed.notify_all();
    }

    /// It has ended, as the line `last` of [`events`] says.
    pub fn end(&self, last: Value) {
        self.0.lock().last = Some(Arc::new(last));
        self.0.changed.notify_all();
    }

    /// Waits until all who watch were told the end, for up to `limit`: comes before the end of the
    /// process.
    pub fn settle(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut now = self.0.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if now.watching == 0 || left.is_zero() {
                return;
            }
            let waited = self.0.changed.wait_timeout(now, left);
            now = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells whoever is at the other end of `stream` from now on, until the migration ends or that
    /// end is closed.
    ///
    /// # Errors
    /// Why not, in words for who asked.
    pub fn tell(&self, stream: &UnixStream) -> Result<(), String> {
        let mut now = self.0.lock();
        if now.watching == MOST {
            return Err(format!("{MOST} watch this migration already: end one of them"));
        }
        now.watching += 1;
        drop(now);
        let watcher = Watcher(Arc::clone(&self.0));
        let failed = |error: io::Error| format!("it cannot be watched: {error}");
        let stream = stream.try_clone().map_err(failed)?;
        stream.set_write_timeout(Some(WRITE_LIMIT)).map_err(failed)?;
        let tell = move || {
            // Who does not read, or has gone, is heard of no more.
            let _ = watcher.tell(&stream);
        };
        let thread = std::thread::Builder::new().name("watcher".to_owned());
        thread.spawn(tell).map(drop).map_err(failed)
    }
}

impl Watcher {
    fn tell(&self, stream: &UnixStream) -> io::Result<()> {
        let [.., version] = VERSIONS;
        let say = |line: &Value| {
            let mut stream = stream;
            stream.write_all(format!("{line}\n").as_bytes())
        };
        say(&serde_json::to_value(Answer::Watching { version })?)?;
        let (mut looks, mut severed, mut said) = (0, false, None::<Instant>);
        loop {
            let due = said.map_or(Duration::ZERO, |said| INTERVAL.saturating_sub(said.elapsed()));
            let Some(now) = self.change(looks, due) else {
                if has_gone(stream) {
                    return Ok(());
                }
                continue;
            };
            if let Some(progress) = now.progress.as_ref().filter(|_| now.looks > looks) {
                let is_severed = progress.severed.is_some();
                if std::mem::replace(&mut severed, is_severed) != is_severed {
                    say(&events::turn(progress))?;
                }
                say(&events::progress(progress))?;
                (looks, said) = (now.looks, Some(Instant::now()));
            }
            if let Some(last) = now.last {
                return say(&last);
            }
        }
    }

    /// What is not told yet, after so many looks and not before `due`; none when it is not due, or
    /// nothing has changed for a while.
    fn change(&self, looks: u64, due: Duration) -> Option<Now> {
        let is_there = |now: &Now| now.last.is_some() || (due.is_zero() && now.looks > looks);
        let now = self.0.lock();
        if is_there(&now) {
            return Some(now.clone());
        }
        let wait = if due.is_zero() { THERE } else { due };
        let waited = self.0.changed.wait_timeout(now, wait);
        let (now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        is_there(&now).then(|| now.clone())
    }
}

/// Whether the other end is closed. One that only sends no more reads still.
fn has_gone(stream: &UnixStream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Whatever is asked for, HUP is told when both directions are closed (poll(2), unix_poll).
    let mut end = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut end, Some(&now)).is_ok_and(|_| end[0].revents().contains(PollFlags::HUP))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use godwit_engine::report::{Severed, Stage};
    use godwit_units::ByteCount;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn look(round: u32) -> Progress {
        let line = r#"{"elapsed_ms":1.5,"stage":"pre-copy","round":0,"round_ended":false,
            "sent_bytes":4096,"remaining_bytes":8192,"dirty_bytes_per_second":null,
            "bandwidth_bytes_per_second":null,"expected_downtime_ms":null,"remaining_time":null,
            "throttle":0.0,"guest_speed":null,"delayed_segments":0,"advice":null,"warning":null}"#;
        let look: Progress = serde_json::from_str(line).unwrap();
        Progress { round, ..look }
    }

    fn watched() -> (Watched, impl Iterator<Item = Value>) {
        let watched = Watched::default();
        let lines = watch(&watched).unwrap();
        (watched, lines)
    }

    fn watch(watched: &Watched) -> Result<impl Iterator<Item = Value> + use<>, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        watched.tell(&theirs)?;
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        let lines = BufReader::new(ours).lines();
        Ok(lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap()))
    }

    #[test]
    fn who_watches_is_told_what_changes_and_how_it_ended() {
        let (watched, mut lines) = watched();
        assert_eq!(lines.next().unwrap()["answer"], "watching");
        watched.see(&look(0));
        assert_eq!(lines.next().unwrap()["event"], "progress");
        let severed = Severed {
            since: Duration::ZERO,
            left: Duration::from_secs(60),
            attempts: 0,
            why: "reset".to_owned(),
        };
        watched.see(&Progress { severed: Some(severed), ..look(1) });
        assert_eq!(lines.next().unwrap()["event"], "severed");
        assert_eq!(lines.next().unwrap()["round"], 1);
        watched.see(&Progress { stage: Stage::Handover, remaining: ByteCount(0), ..look(2) });
        watched.end(events::refused(&"no"));
        let rest: Vec<Value> = lines.collect();
        assert_eq!(rest.len(), 3, "{rest:?}");
        assert_eq!(rest[0]["event"], "resumed");
        assert_eq!(
            (&rest[1]["event"], &rest[1]["stage"]),
            (&"progress".into(), &"handover".into())
        );
        assert_eq!(rest[2]["outcome"], "refused");
        watched.settle(LIMIT);
        assert_eq!(watched.0.lock().watching, 0);
    }

    #[test]
    fn looks_that_come_faster_are_left_out() {
        // Mutation: every look is told.
        let (watched, lines) = watched();
        let began = Instant::now();
        let mut round = 0;
        while began.elapsed() < INTERVAL * 3 {
            watched.see(&look(round));
            round += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        let most = 2 + began.elapsed().as_millis() / INTERVAL.as_millis();
        watched.end(events::refused(&"over"));
        let lines: Vec<Value> = lines.collect();
        // The first, the last and the end are there whatever the time.
        assert!(lines.len() as u128 - 2 <= most, "{} lines", lines.len());
        assert_eq!(lines[lines.len() - 2]["round"], round - 1);
    }

    #[test]
    fn who_does_not_read_holds_nothing_up() {
        // Mutation: looks are written by the thread of the migration.
        let watched = Watched::default();
        let (_ours, theirs) = UnixStream::pair().unwrap();
        watched.tell(&theirs).unwrap();
        // More than a socket holds.
        let long = Progress { advice: Some("x".repeat(1 << 20)), ..look(0) };
        let began = Instant::now();
        for _ in 0..3 {
            watched.see(&long);
        }
        let seen = began.elapsed();
        watched.end(events::refused(&"over"));
        watched.settle(Duration::from_millis(50));
        assert_eq!(watched.0.lock().watching, 1, "it is being written to");
        assert!(seen < WRITE_LIMIT, "{seen:?}");
        watched.settle(LIMIT);
        assert_eq!(watched.0.lock().watching, 0, "it was not given up");
    }

    #[test]
    fn who_goes_is_forgotten_and_there_are_not_too_many() {
        let watched = Watched::default();
        let mut all: Vec<_> = (0..MOST).map(|_| watch(&watched).unwrap()).collect();
        let why = watch(&watched).err().unwrap();
        assert!(why.contains("16 watch this migration already"), "{why}");
        all.pop();
        let until = Instant::now() + LIMIT;
        while watched.0.lock().watching == MOST && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(watch(&watched).unwrap());
    }

    #[test]
    fn who_sends_no_more_is_told_still() {
        let watched = Watched::default();
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        watched.tell(&theirs).unwrap();
        drop(theirs);
        std::thread::sleep(THERE + Duration::from_millis(200));
        watched.end(events::refused(&"over"));
        assert_eq!(BufReader::new(ours).lines().count(), 2);
    }
}
