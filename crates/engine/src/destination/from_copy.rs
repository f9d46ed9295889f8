//! The source is lost, and pages of the guest that runs here are missing: they are taken from the
//! copy that it made of them in a third place, if it did.
//!
//! Invariant: what is taken from there is what the source would send, since nobody writes its
//! memory any more. So both may go on at once, and a page that comes twice is placed once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use godwit_units::PageCount;

use super::Notice;
use super::arriving::Arriving;
use crate::remainder::{Known, Remainder};
use crate::{EngineError, limits, threads};

/// Between two attempts to open the copy: the storage may come back.
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

/// A thread that places what is in the copy, until this is dropped. That does not wait for it: the
/// storage may hang.
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
        let Some(copy) = self.open(tell) else { return };
        let _ = tell.send(Notice::Copy { path: self.copied.path.clone(), why: None });
        let mut bytes = Vec::new();
        // Parts that could not be placed: who waits for them goes on waiting.
        let mut hurt = vec![false; copy.parts()];
        let mut rest = 0..copy.parts();
        while !self.is_over() {
            let wanted = self.arriving.still_wanted();
            let wanted = wanted.into_iter().filter_map(|(own, page)| copy.find(own, page));
            let mut parts: Vec<usize> = wanted.filter(|part| !hurt[*part]).collect();
            parts.dedup();
            parts.extend(rest.next());
            if parts.is_empty() {
                std::thread::sleep(LOOK);
            }
            for part in parts {
                if let Err(error) = self.place(&copy, part, &mut bytes) {
                    hurt[part] = true;
                    self.say(tell, &error);
                }
            }
        }
    }

    /// The copy, as soon as it can be opened.
    fn open(&self, tell: &Sender<Notice>) -> Option<Remainder> {
        let Copied { path, known, order } = &self.copied;
        let mut said = None;
        while !self.is_over() {
            match Remainder::open(path, *known, order, self.arriving.blocks()) {
                Ok(copy) => return Some(copy),
                Err(error) => {
                    let words = error.to_string();
                    if said.as_ref() != Some(&words) {
                        self.say(tell, &error);
                        said = Some(words);
                    }
                }
            }
            let pauses = AGAIN.div_duration_f64(limits::TICK) as u32;
            (0..pauses).take_while(|_| !self.is_over()).for_each(|_| {
                std::thread::sleep(limits::TICK);
            });
        }
        None
    }

    fn place(&self, copy: &Remainder, part: usize, bytes: &mut Vec<u8>) -> Result<(), EngineError> {
        let (own, run) = copy.pages(part);
        if !self.arriving.lacks(own, run) {
            return Ok(());
        }
        let content = copy.read(part, bytes)?;
        // What has come back meanwhile may send it as well, which does no harm.
        self.arriving.place(own, run, content, bytes)
    }

    fn say(&self, tell: &Sender<Notice>, error: &EngineError) {
        let why = match error {
            EngineError::Remainder { why, .. } => why.clone(),
            other => other.to_string(),
        };
        let _ = tell.send(Notice::Copy { path: self.copied.path.clone(), why: Some(why) });
    }
}
