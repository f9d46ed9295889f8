//! Moves on another host than the coordinator's: a godwit there is told of each step, line by line,
//! over whatever runs it (ssh, for one), and does what [`Moves`](crate::Moves) do.
//!
//! Invariant: what became of a question that was not answered is not guessed. A move that may have
//! begun counts as under way until the host can be asked again, and nothing begins until then.

mod link;
mod serve;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use godwit_units::Rate;
use serde::{Deserialize, Serialize};

use self::link::{ANSWER_LIMIT, Link, SILENT};
pub use self::serve::{Host, serve_hands};
use crate::list::ListedVm;
use crate::plan::{Attempt, Home, Plan};
use crate::runner::{Hands, Look};

/// Whoever steers the coordinator waits meanwhile. What is answered later is kept.
const PATIENCE: Duration = Duration::from_secs(1);
/// An operator is told of a host that has not answered for so long; and to a question that may take
/// this long, as a destination takes half a minute to listen.
const SILENCE: Duration = Duration::from_secs(5);
const WORK: Duration = Duration::from_secs(45);
/// Between two attempts to reach the host.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// The evacuation of this name, whose files are there, if that is known: beside those of others
    /// of the name, where the path is relative.
    Open(String, Option<PathBuf>),
    Clear,
    Plan(Plan),
    Begin(Attempt, f64),
    Look(Attempt),
    Pace(Attempt, f64),
    Cancel(Attempt),
    /// Which of the VMs of a manager there are to leave.
    Vms {
        manager: String,
        only: Vec<String>,
        except: Vec<String>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Home(Home),
    Done,
    No(String),
    Seen(Look),
    Vms(Vec<ListedVm>),
}

/// Which files of moves on the host are meant.
///
/// ```
/// use godwit_evacuate::{Files, RemoteHands};
///
/// let nowhere = ["/nowhere/godwit".to_owned()];
/// let refused = RemoteHands::reach(&nowhere, "weekly", Files::New).unwrap_err();
/// assert!(refused.starts_with("/nowhere/godwit does not start"));
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Files<'a> {
    /// Those of the evacuation's name, for all coordinators that have one store.
    OfName,
    /// Those of a new plan that nobody else has.
    New,
    /// Those of a plan that is known, and no other host's.
    Known(&'a Home),
}

/// Hands on another host.
#[derive(Debug)]
pub struct RemoteHands {
    command: Vec<String>,
    name: String,
    files: Option<PathBuf>,
    home: Option<Home>,
    link: Option<Link>,
    /// The bandwidth of the plan that it knows, if it knows it: nothing else of a plan changes.
    knows_plan: Option<f64>,
    /// When the host was last tried in vain, and what was heard.
    failed: Option<(Instant, String)>,
    /// Moves whose end was told when nobody waited for it any more.
    late: Vec<(Attempt, Look)>,
}

/// The words that run hands where `command` runs godwit.
fn hands_by(command: &[String]) -> Vec<String> {
    command.iter().cloned().chain(["evacuate", "--hands"].map(str::to_owned)).collect()
}

impl RemoteHands {
    /// Hands of the evacuation `name` by `command`, which runs `godwit` on the host that is
    /// emptied; the host is asked for its name.
    ///
    /// # Errors
    /// When it cannot be reached, or is another host than the one that is known.
    pub fn reach(command: &[String], name: &str, files: Files<'_>) -> Result<Self, String> {
        let (home, files) = match files {
            Files::OfName => (None, None),
            Files::New => (None, Some(format!("moves-{:016x}", fastrand::u64(..)).into())),
            Files::Known(home) => (Some(home), Some(home.directory.clone())),
        };
        let mut hands = Self {
            command: hands_by(command),
            name: name.to_owned(),
            files,
            home: home.cloned(),
            link: None,
            knows_plan: None,
            failed: None,
            late: Vec::new(),
        };
        if hands.is_open(Instant::now() + ANSWER_LIMIT)? { Ok(hands) } else { Err(SILENT.into()) }
    }

    /// The virtual machines that `manager` keeps on the host where `command` runs `godwit`: those
    /// that are to leave.
    ///
    /// # Errors
    /// When it cannot be reached, or they cannot be told.
    pub fn vms(
        command: &[String],
        manager: &str,
        only: &[String],
        except: &[String],
    ) -> Result<Vec<ListedVm>, String> {
        let mut link = Link::start(&hands_by(command))?;
        let (manager, only, except) = (manager.to_owned(), only.to_owned(), except.to_owned());
        link.put(Ask::Vms { manager, only, except })?;
        match link.hear(Instant::now() + ANSWER_LIMIT)? {
            Some((_, Answer::Vms(vms))) => Ok(vms),
            Some((_, Answer::No(why))) => Err(why),
            _ => Err(SILENT.to_owned()),
        }
    }

    /// Which host it is, and where its files are.
    #[must_use]
    pub fn home(&self) -> Option<&Home> {
        self.home.as_ref()
    }

    /// As [`Moves::clear`](crate::Moves::clear).
    ///
    /// # Errors
    /// When that cannot be done.
    pub fn clear(&mut self) -> Result<(), String> {
        let until = Instant::now() + ANSWER_LIMIT;
        let is_open = self.is_open(until)?;
        let answer =
            if is_open { self.put(Ask::Clear).and_then(|()| self.hear(until))? } else { None };
        match answer {
            Some(Answer::Done) => Ok(()),
            Some(Answer::No(why)) => Err(why),
            _ => Err(SILENT.to_owned()),
        }
    }

    /// Whether the host is there and free to answer, before `until`: it was told whose hands are
    /// wanted, and what was asked has been answered.
    fn is_open(&mut self, until: Instant) -> Result<bool, String> {
        if self.link.is_none() {
            let mut link = Link::start(&self.command)?;
            link.put(Ask::Open(self.name.clone(), self.files.clone()))?;
            self.link = Some(link);
            self.knows_plan = None;
        }
        let Some(link) = &mut self.link else { return Ok(false) };
        if link.asked().is_none() {
            return Ok(true);
        }
        let Some((ask, answer)) = link.hear(until)? else { return Ok(false) };
        match (ask, answer) {
            (Ask::Open(..), Answer::Home(home)) => {
                if let Some(known) = self.home.as_ref().filter(|known| **known != home) {
                    return Err(format!(
                        "that is the host {}, and the plan is of {}: name the command that runs \
                         godwit there",
                        home.host, known.host
                    ));
                }
                self.files = Some(home.directory.clone());
                self.home = Some(home);
            }
            (Ask::Open(..), Answer::No(why)) => return Err(why),
            (Ask::Open(..), other) => return Err(format!("{other:?} is no answer to who it is")),
            (Ask::Plan(plan), Answer::Done) => self.knows_plan = Some(plan.bytes_per_second),
            (Ask::Plan(_) | Ask::Look(_), Answer::No(why)) => return Err(why),
            (Ask::Begin(attempt, _), Answer::No(why)) => {
                self.late.push((attempt, Look::Failed(why)));
            }
            // What was found may not be found once more: one that never began is told so once. And
            // who is slow to answer is not asked of this move again before the others.
            (Ask::Look(attempt), Answer::Seen(look)) => self.late.push((attempt, look)),
            _ => {}
        }
        Ok(true)
    }

    fn put(&mut self, ask: Ask) -> Result<(), String> {
        self.link.as_mut().map_or(Ok(()), |link| link.put(ask))
    }

    /// The answer to what was put last, if it comes before `until`.
    fn hear(&mut self, until: Instant) -> Result<Option<Answer>, String> {
        let heard = self.link.as_mut().map_or(Ok(None), |link| link.hear(until))?;
        Ok(heard.map(|(_, answer)| answer))
    }

    /// When an answer is no longer waited for.
    fn patience(&self) -> Instant {
        let asked = self.link.as_ref().and_then(Link::asked);
        asked.map_or_else(Instant::now, |(_, since)| *since) + PATIENCE
    }

    /// What `talk` has heard, if the host can be asked.
    fn reached<T>(
        &mut self,
        talk: impl FnOnce(&mut Self) -> Result<Option<T>, String>,
    ) -> Option<T> {
        if self.failed.as_ref().is_some_and(|(when, _)| when.elapsed() < AGAIN) {
            return None;
        }
        match talk(self) {
            Ok(heard) => {
                if heard.is_some() {
                    self.failed = None;
                }
                heard
            }
            Err(why) => {
                self.link = None;
                self.failed = Some((Instant::now(), why));
                None
            }
        }
    }

    /// The answer, if there is one by now.
    fn ask(&mut self, plan: &Plan, ask: Ask) -> Option<Answer> {
        let is_look = matches!(ask, Ask::Look(_));
        self.reached(|hands| {
            if !hands.is_open(hands.patience())? {
                return Ok(None);
            }
            if hands.knows_plan != Some(plan.bytes_per_second) {
                hands.put(Ask::Plan(plan.clone()))?;
                if !hands.is_open(hands.patience())? {
                    return Ok(None);
                }
            }
            hands.put(ask)?;
            match hands.hear(hands.patience())? {
                // Of a plan that it has it knows each move.
                Some(Answer::No(why)) if is_look => Err(why),
                heard => Ok(heard),
            }
        })
    }
}

impl Hands for RemoteHands {
    fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
        match self.ask(plan, Ask::Begin(attempt.clone(), rate.bytes_per_second())) {
            Some(Answer::No(why)) => Err(why),
            // Without an answer it may have begun: that is looked at.
            _ => Ok(()),
        }
    }

    fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look {
        // What was asked before may have been answered meanwhile.
        self.are_there();
        if let Some(at) = self.late.iter().position(|(of, _)| of == attempt) {
            return self.late.swap_remove(at).1;
        }
        match self.ask(plan, Ask::Look(attempt.clone())) {
            Some(Answer::Seen(look)) => look,
            _ => Look::Moving,
        }
    }

    fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool {
        let ask = Ask::Pace(attempt.clone(), rate.bytes_per_second());
        matches!(self.ask(plan, ask), Some(Answer::Done))
    }

    fn cancel(&mut self, plan: &Plan, attempt: &Attempt) {
        let _ = self.ask(plan, Ask::Cancel(attempt.clone()));
    }

    fn are_there(&mut self) -> bool {
        let open = |hands: &mut Self| Ok(hands.is_open(hands.patience())?.then_some(()));
        self.reached(open).is_some()
    }

    fn trouble(&self) -> Option<String> {
        let is_silent = |(ask, since): &&(Ask, Instant)| {
            let may_take = match ask {
                Ask::Begin(..) | Ask::Look(_) => WORK,
                _ => SILENCE,
            };
            since.elapsed() > may_take
        };
        let asked = self.link.as_ref().and_then(Link::asked);
        let silent = asked.filter(is_silent).map(|_| SILENT.to_owned());
        self.failed.as_ref().map(|(_, why)| why.clone()).or(silent)
    }
}

#[cfg(test)]
mod tests;
