//! The source is lost, and pages of the guest that runs here are missing: they are taken from the
//! copy that it made of them in a third place, if it did.
//!
//! Invariant: what is taken from there is what the source would send, since nobody writes its
//! memory any more. So both may go on at once, and a page that comes twice is placed once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use godwit_units::PageCount;

use super::Notice;
use super::arriving::Arriving;
use crate::remainder::{Known, Remainder, Unread};
use crate::{EngineError, limits, threads};

/// Between two attempts to read the copy: the storage may come back.
const AGAIN: Duration = Duration::from_secs(1);
/// Between two looks at what somebody waits for, when all parts were placed or cannot be.
const LOOK: Duration = Duration::from_millis(2);

/// The copy, as this machine would read it.
pub(super) struct Copied {
    pub(super) path: PathBuf,
    pub(super) known: Known,
    /// The source's number of a block -> ours.
    pub(super) order: Vec<usize>,
}

/// A thread that places what is in the copy, whether the source comes back or not, until this is
/// dropped; that does not wait for it, as the storage may hang.
pub(super) struct FromCopy {
    stop: Arc<AtomicBool>,
    told: Receiver<Notice>,
}

impl FromCopy {
    pub(super) fn start(copied: Copied, arriving: &Arc<Arriving>) -> Result<Self, EngineError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, told) = mpsc::channel();
        let placing = Placing { copied, arriving: Arc::clone(arriving), stop: Arc::clone(&stop) };
        threads::start("copy", move || placing.run(&tell))?;
        Ok(Self { stop, told })
    }

    /// What it has to say since it was asked last.
    pub(super) fn told(&self) -> impl Iterator<Item = Notice> {
        self.told.try_iter()
    }
}

impl Drop for FromCopy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

struct Placing {
    copied: Copied,
    arriving: Arc<Arriving>,
    stop: Arc<AtomicBool>,
}

impl Placing {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.arriving.left() == PageCount::ZERO
    }

    fn run(&self, tell: &Sender<Notice>) {
        let mut telling = Telling { tell, path: &self.copied.path, last: None };
        let mut hurt = BTreeSet::new();
        while let Some(copy) = self.open(&mut telling) {
            telling.say(None);
            let Err(error) = self.place_all(&copy, &mut hurt, &mut telling) else { return };
            // The storage may come back, and the file under another handle.
            telling.say(Some(&error));
            self.pause();
        }
    }

    /// Places what is in `copy`: what somebody waits for first. Parts that are `hurt` are left out,
    /// and who waits for them goes on waiting.
    fn place_all(
        &self,
        copy: &Remainder,
        hurt: &mut BTreeSet<usize>,
        telling: &mut Telling<'_>,
    ) -> Result<(), EngineError> {
        let (mut bytes, mut rest) = (Vec::new(), 0..copy.parts());
        while !self.is_over() {
            let wanted = self.arriving.still_wanted();
            let wanted = wanted.into_iter().filter_map(|(own, page)| copy.find(own, page));
            let mut parts: Vec<usize> = wanted.filter(|part| !hurt.contains(part)).collect();
            parts.dedup();
            if parts.is_empty() {
                parts.extend(rest.next().filter(|part| !hurt.contains(part)));
            }
            if parts.is_empty() && rest.is_empty() {
                std::thread::sleep(LOOK);
            }
            for part in parts {
                match self.place(copy, part, &mut bytes) {
                    Ok(()) => {}
                    Err(Unread::Failed(error)) => return Err(error),
                    Err(Unread::Damaged(error)) => {
                        hurt.insert(part);
                        telling.say(Some(&error));
                    }
                }
            }
        }
        Ok(())
    }

    /// The copy, as soon as it can be opened.
    fn open(&self, telling: &mut Telling<'_>) -> Option<Remainder> {
        let Copied { path, known, order } = &self.copied;
        while !self.is_over() {
            match Remainder::open(path, *known, order, self.arriving.blocks()) {
                Ok(copy) => return Some(copy),
                Err(error) => telling.say(Some(&error)),
            }
            self.pause();
        }
        None
    }

    fn pause(&self) {
        let until = Instant::now() + AGAIN;
        while !self.is_over() && Instant::now() < until {
            std::thread::sleep(limits::TICK);
        }
    }

    fn place(&self, copy: &Remainder, part: usize, bytes: &mut Vec<u8>) -> Result<(), Unread> {
        let (own, run) = copy.pages(part);
        if !self.arriving.lacks(own, run) {
            return Ok(());
        }
        let content = copy.read(part, bytes)?;
        // What has come back meanwhile may send it as well, which does no harm.
        self.arriving.place(own, run, content, bytes).map_err(Unread::Failed)
    }
}

/// Tells how it stands with the copy, when that is not what was told last.
struct Telling<'a> {
    tell: &'a Sender<Notice>,
    path: &'a Path,
    last: Option<Option<String>>,
}

impl Telling<'_> {
    fn say(&mut self, error: Option<&EngineError>) {
        let why = error.map(|error| match error {
            EngineError::Remainder { why, .. } => why.clone(),
            other => other.to_string(),
        });
        if self.last.as_ref() != Some(&why) {
            let _ = self.tell.send(Notice::Copy { path: self.path.to_owned(), why: why.clone() });
            self.last = Some(why);
        }
    }
}
