//! Post-copy at the destination: the guest runs, and what is missing is asked for and placed. Only
//! the source has it, so whatever fails is waited out.
//!
//! Invariant: between the word that pages are missing and the last of them nothing is placed but by
//! [`ArrivingPages`](crate::vm::ArrivingPages), which has each placed once.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_protocol::destination::Input;
use godwit_units::{PageCount, PageRun};
use godwit_wire::{Feature, MISSING_LIMIT, Message};

use super::arriving::Fetching;
use super::channel::PEER;
use super::from_copy::{Copied, FromCopy};
use super::lanes::Lanes;
use super::left::{Left, runs_of};
use super::record::Record;
use super::session::{Found, out_of_place};
use super::{Destination, Notice, Stage};
use crate::missing::{MissingList, joined};
use crate::remainder::Known;
use crate::vm::ArrivingPages;
use crate::{EngineError, limits, remainder};

/// How often it is looked whether the last page has come.
const LOOK: Duration = Duration::from_millis(2);

impl Destination<'_> {
    /// Takes in what the source says is missing; an input when it has said all.
    pub(super) fn take_missing(
        &mut self,
        stage: &Stage,
        message: &Message,
    ) -> Result<Option<Input>, EngineError> {
        let (Message::Missing { block, last, runs }, Some(lanes)) = (message, stage.lanes()) else {
            return Err(out_of_place(message));
        };
        if !self.session.has(Feature::PostCopy) || self.left {
            return Err(out_of_place(message));
        }
        let ram = &self.ram;
        let list = self.missing.get_or_insert_with(|| MissingList::new(PEER, ram, lanes.order()));
        list.add(*block, runs)?;
        Ok(last.then_some(Input::Missing))
    }

    /// From here on whoever accesses a missing page waits.
    pub(super) fn await_pages(&mut self, lanes: &mut Lanes) -> Result<(), EngineError> {
        let Some(list) = self.missing.take() else { return Err(EngineError::Panicked("main")) };
        self.left = true;
        lanes.refuse_pages();
        lanes.add_urgent(&self.session, self.notice)?;
        let vm = self.vm.post_copy().ok_or(EngineError::Panicked("main"))?;
        let missing = list.into_missing();
        let runs = runs_of(&missing);
        let pages = vm.await_pages(missing).map_err(EngineError::Vm)?;
        self.to_be_left = Some(runs);
        self.begin_to_fetch(lanes, pages)
    }

    /// Where pages are missing: writes down what another godwit fetches them by. Nobody needs it
    /// before the source can say that the guest is ours.
    pub(super) fn write_left(&mut self, lanes: &Lanes) -> Result<(), EngineError> {
        let Some(runs) = self.to_be_left.take() else { return Ok(()) };
        let kept = self.vm.post_copy().and_then(|vm| vm.kept());
        if let (Some(kept), Some(record)) = (kept, self.known_by(lanes)) {
            // The connections that there are come from this attempt: no earlier one counts.
            let record = Record { attempt: lanes.placed().0, ..record };
            self.followed = Some(Left::write(kept, record, runs)?);
        }
        Ok(())
    }

    /// From here on what comes is one of the `pages` that are missing.
    pub(super) fn begin_to_fetch(
        &mut self,
        lanes: &Lanes,
        pages: Arc<dyn ArrivingPages>,
    ) -> Result<(), EngineError> {
        let (control, cells) = (self.session.control(), self.session.cells());
        let way = (control, self.session.interrupt());
        let fetching = Fetching::start(pages, (&self.ram, lanes.order()), way, cells)?;
        lanes.have_arrive(fetching.arriving());
        self.fetching = Some(fetching);
        Ok(())
    }

    /// What has really gone wrong where the machine could not be given its device state by `error`:
    /// it may have waited for a page, and the channel be gone over which that was to come. What the
    /// source gave up by, which ends its channels, says most.
    pub(super) fn starved(&self, lanes: Option<&Lanes>, error: EngineError) -> EngineError {
        let Some(lanes) = lanes.filter(|_| self.left) else { return error };
        let said = self.session.interruption().filter(|said| !said.is_loss());
        said.or_else(|| lanes.failure()).unwrap_or(error)
    }

    /// Waits until every missing page is in place.
    pub(super) fn fetch(&mut self, lanes: &Lanes) -> Result<Input, EngineError> {
        let mut told = Instant::now();
        loop {
            let Some(fetching) = &self.fetching else { return Ok(Input::AllPlaced) };
            if fetching.left() == PageCount::ZERO {
                return Ok(Input::AllPlaced);
            }
            if self.vm.has_ended() {
                return Err(EngineError::Ended("destination"));
            }
            if let Some(error) = fetching.failure().or_else(|| lanes.failure()) {
                return Err(error);
            }
            if lanes.have_ended() {
                // A source that asked who runs the guest has made no others: it is to come back.
                let source = io::ErrorKind::NotConnected.into();
                return Err(EngineError::Link { peer: PEER, source });
            }
            if told.elapsed() >= limits::ALIVE {
                told = Instant::now();
                (self.notice)(&Notice::Fetching { left: fetching.left().bytes() });
                self.tell_of_copy();
            }
            let until = Instant::now() + LOOK;
            match self.session.words_until(self.vm, until, self.notice)? {
                None => {}
                Some(Message::Commit) => return Ok(Input::Commit),
                Some(Message::LatePacket(packet)) if self.takes_packets() => self.deliver(packet),
                Some(other) => return Err(out_of_place(&other)),
            }
        }
    }

    /// Every missing page is in place: the source is told so, and the machine let go.
    pub(super) fn say_placed(&mut self) -> Result<(), EngineError> {
        self.session.linger_anew();
        let said = self.session.say(&Message::Placed);
        self.let_go();
        said
    }

    /// Nothing is missing any more: the machine is let go.
    fn let_go(&mut self) {
        self.copy = None;
        if let Some(mut fetching) = self.fetching.take() {
            match fetching.finish() {
                Ok(fetched) => self.measures.fetched = Some(fetched),
                // It does no harm, and the guest runs.
                Err(error) => tracing::warn!(%error, "something stays in the machine"),
            }
            self.measures.total = self.session.elapsed();
            // The source removes it as well, if it is there.
            if let Some((path, _)) = self.copy_is_at() {
                remainder::remove(path);
            }
        }
    }

    /// Where the source's copy of what is missing is, if it makes one, and by what it is opened.
    fn copy_is_at(&self) -> Option<(PathBuf, Known)> {
        let known = self.session.known()?;
        let directory = self.safe.as_ref()?;
        Some((remainder::place(directory, known.0), known))
    }

    /// Tells how it stands with the copy, where it is in use.
    fn tell_of_copy(&mut self) {
        for told in self.copy.iter().flat_map(FromCopy::told) {
            (self.notice)(&told);
        }
    }

    /// Begins to take what is missing from the source's copy of it, if there may be one.
    fn take_from_copy(&self) -> Option<FromCopy> {
        let fetching = self.fetching.as_ref()?;
        let (path, known) = self.copy_is_at()?;
        let copied = Copied { path, known, order: fetching.order() };
        FromCopy::start(copied, fetching.arriving())
            .inspect_err(|error| tracing::warn!(%error, "nothing is taken from the copy"))
            .ok()
    }

    /// Which pages are missing, when only the source has them and it is lost.
    pub(super) fn tell_lacks(&mut self) {
        let Some(fetching) = &self.fetching else { return };
        let missing = (0..self.ram.len()).map(|own| fetching.left_of(own)).collect();
        let missing = self.ram.iter().zip(joined(missing, MISSING_LIMIT));
        let missing = missing
            .filter(|(_, runs)| !runs.is_empty())
            .map(|(block, runs)| (block.name().to_owned(), runs))
            .collect();
        let all = fetching.left().bytes();
        (self.notice)(&Notice::Lacks { all, missing });
    }

    /// How many pages are missing.
    fn left_to_come(&self) -> PageCount {
        self.fetching.as_ref().map_or(PageCount::ZERO, Fetching::left)
    }

    /// Whether nothing is missing.
    fn is_whole(&self) -> bool {
        self.left_to_come() == PageCount::ZERO
    }

    /// Waits for the source to come back, without end: nobody else has what is missing. The last of
    /// it may have come while it was lost. Who goes on for one that was killed may leave off, and
    /// leave it to another, as long as it has not come.
    pub(super) fn await_source_again(&mut self) -> Result<Input, EngineError> {
        if self.copy.is_none() {
            self.copy = self.take_from_copy();
        }
        let (mut looked, mut left) = (Instant::now(), self.left_to_come());
        loop {
            self.tell_of_copy();
            if looked.elapsed() >= limits::ALIVE {
                looked = Instant::now();
                let before = std::mem::replace(&mut left, self.left_to_come());
                if left != before {
                    (self.notice)(&Notice::Fetching { left: left.bytes() });
                }
            }
            // What the guest has given back meanwhile is missing no more.
            if self.is_whole() {
                self.let_go();
                self.session.linger_anew();
                return Ok(Input::AllPlaced);
            }
            if self.unheard && self.session.is_cancelled() {
                self.gives_up = true;
                return Err(EngineError::Cancelled);
            }
            let soon = Instant::now() + limits::TICK;
            if let Some(found) = self.session.await_either(self.vm, soon, self.notice)? {
                self.unheard = false;
                return Ok(self.found_again(found));
            }
        }
    }

    /// The same when nothing is missing any more, and the source may not know: within a limit.
    pub(super) fn await_asking_source(&mut self) -> Result<Input, EngineError> {
        let deaf = self.session.was_cancelled();
        (self.notice)(&self.session.awaiting_source());
        let until = self.session.linger();
        loop {
            let soon = until.min(Instant::now() + limits::TICK);
            if let Some(found) = self.session.await_either(self.vm, soon, self.notice)? {
                return Ok(self.found_again(found));
            }
            // The guest has all of its memory, and runs.
            if !deaf && self.session.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            if Instant::now() >= until {
                let what = "the source";
                return Err(EngineError::Timeout { what, limit: limits::LINGER });
            }
        }
    }

    /// A source that comes back is answered; one that asks says COMMIT next.
    fn found_again(&mut self, found: Found) -> Input {
        match found {
            Found::Back(back) => {
                self.back = Some(back);
                Input::Returned
            }
            Found::Asks => Input::Commit,
        }
    }

    /// Tells a source that is back what is still missing, by the runs that it may name in all.
    pub(super) fn tell_missing(&self, lanes: &Lanes) -> Result<(), EngineError> {
        let of_block = |own: &usize| -> Vec<PageRun> {
            self.fetching.as_ref().map_or(Vec::new(), |fetching| fetching.left_of(*own))
        };
        let missing: Vec<Vec<PageRun>> = lanes.order().iter().map(of_block).collect();
        for message in crate::missing::messages(missing, MISSING_LIMIT) {
            self.session.say(&message)?;
        }
        Ok(())
    }
}
