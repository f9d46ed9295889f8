//! Moves on another host than the coordinator's: a godwit there is told of each step, line by line,
//! over whatever runs it (ssh, for one), and does what [`Moves`] do.
//!
//! Invariant: what became of a question that was not answered is not guessed. A move that may have
//! begun counts as under way until the host can be asked again.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use godwit_units::Rate;
use serde::{Deserialize, Serialize};

use crate::moves::Moves;
use crate::plan::{Attempt, Home, Plan};
use crate::runner::{Hands, Look};

/// Until an answer: a destination may take half a minute to listen, and a guest to be found again.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Between two attempts to reach the host.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// The evacuation of this name, whose files are in this directory, if that is known.
    Open(String, Option<PathBuf>),
    Clear,
    Plan(Plan),
    Begin(Attempt, f64),
    Look(Attempt),
    Pace(Attempt, f64),
    Cancel(Attempt),
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Home(Home),
    Done,
    No(String),
    Seen(Look),
}

/// Hands on another host.
#[derive(Debug)]
pub struct RemoteHands {
    command: Vec<String>,
    name: String,
    home: Option<Home>,
    link: Option<Link>,
    /// When the host was last tried in vain, and what was heard.
    failed: Option<(Instant, String)>,
}

#[derive(Debug)]
struct Link {
    child: Child,
    answers: Receiver<std::io::Result<String>>,
    /// The bandwidth of the plan that it knows, if it knows it: nothing else of a plan changes.
    knows_plan: Option<f64>,
}

impl Drop for Link {
    fn drop(&mut self) {
        // It ends with its input; what only carries it (ssh) might not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Link {
    fn start(command: &[String]) -> Result<Self, String> {
        let (program, words) = command.split_first().ok_or("there is no command")?;
        let mut child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{program} does not start: {error}"))?;
        let output = child.stdout.take().ok_or("it has no output")?;
        let (sender, answers) = channel();
        let read = move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        };
        let reader = std::thread::Builder::new().name("hands".to_owned()).spawn(read);
        reader.map_err(|error| format!("no thread can be had: {error}"))?;
        Ok(Self { child, answers, knows_plan: None })
    }

    fn ask(&mut self, ask: &Ask) -> Result<Answer, String> {
        let line = serde_json::to_string(ask).map_err(|error| error.to_string())?;
        let input = self.child.stdin.as_mut().ok_or("it has no input")?;
        let asked = writeln!(input, "{line}").and_then(|()| input.flush());
        match (asked, self.answers.recv_timeout(ANSWER_LIMIT)) {
            (Ok(()), Ok(Ok(line))) => serde_json::from_str(&line)
                .map_err(|_| format!("'{line}' is no answer: is that godwit of this release?")),
            _ => Err(self.last_words()),
        }
    }

    /// Why it does not answer.
    fn last_words(&mut self) -> String {
        let _ = self.child.kill();
        let mut text = String::new();
        if let Some(errors) = self.child.stderr.take() {
            let _ = errors.take(64 << 10).read_to_string(&mut text);
        }
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.unwrap_or("it does not answer").trim_start_matches("godwit: ").to_owned()
    }
}

impl RemoteHands {
    /// Hands of the evacuation `name` by `command`, which runs `godwit` on the host that is
    /// emptied. The host is asked for its name, and for its files, unless `home` says where they
    /// are.
    ///
    /// # Errors
    /// When it cannot be reached, or is another host than `home`.
    pub fn reach(command: &[String], name: &str, home: Option<&Home>) -> Result<Self, String> {
        let words = ["evacuate", "--hands"].map(str::to_owned);
        let mut hands = Self {
            command: command.iter().cloned().chain(words).collect(),
            name: name.to_owned(),
            home: home.cloned(),
            link: None,
            failed: None,
        };
        hands.connect()?;
        Ok(hands)
    }

    /// Which host it is, and where its files are.
    #[must_use]
    pub fn home(&self) -> Option<&Home> {
        self.home.as_ref()
    }

    /// As [`Moves::clear`].
    ///
    /// # Errors
    /// When that cannot be done.
    pub fn clear(&mut self) -> Result<(), String> {
        match self.connect()?.ask(&Ask::Clear)? {
            Answer::No(why) => Err(why),
            _ => Ok(()),
        }
    }

    /// Why the host was not reached when it was tried last.
    #[must_use]
    pub fn trouble(&self) -> Option<&str> {
        self.failed.as_ref().map(|(_, why)| why.as_str())
    }

    fn connect(&mut self) -> Result<&mut Link, String> {
        let link = match self.link.take() {
            Some(link) => link,
            None => {
                let mut link = Link::start(&self.command)?;
                let directory = self.home.as_ref().map(|home| home.directory.clone());
                match link.ask(&Ask::Open(self.name.clone(), directory))? {
                    Answer::Home(home) => {
                        if let Some(known) = self.home.as_ref().filter(|known| **known != home) {
                            return Err(format!(
                                "that is the host {}, and the plan is of {}",
                                home.host, known.host
                            ));
                        }
                        self.home = Some(home);
                    }
                    Answer::No(why) => return Err(why),
                    other => return Err(format!("{other:?} is no answer to who it is")),
                }
                link
            }
        };
        Ok(self.link.insert(link))
    }

    /// The answer, if there is one.
    fn ask(&mut self, plan: &Plan, ask: &Ask) -> Option<Answer> {
        if self.failed.as_ref().is_some_and(|(when, _)| when.elapsed() < AGAIN) {
            return None;
        }
        let told = self.connect().and_then(|link| {
            if link.knows_plan != Some(plan.bytes_per_second) {
                link.ask(&Ask::Plan(plan.clone()))?;
                link.knows_plan = Some(plan.bytes_per_second);
            }
            link.ask(ask)
        });
        match told {
            Ok(answer) => {
                self.failed = None;
                Some(answer)
            }
            Err(why) => {
                self.link = None;
                self.failed = Some((Instant::now(), why));
                None
            }
        }
    }
}

impl Hands for RemoteHands {
    fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
        match self.ask(plan, &Ask::Begin(attempt.clone(), rate.bytes_per_second())) {
            Some(Answer::No(why)) => Err(why),
            // Without an answer it may have begun: that is looked at.
            _ => Ok(()),
        }
    }

    fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look {
        match self.ask(plan, &Ask::Look(attempt.clone())) {
            Some(Answer::Seen(look)) => look,
            _ => Look::Moving,
        }
    }

    fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool {
        let ask = Ask::Pace(attempt.clone(), rate.bytes_per_second());
        matches!(self.ask(plan, &ask), Some(Answer::Done))
    }

    fn cancel(&mut self, plan: &Plan, attempt: &Attempt) {
        let _ = self.ask(plan, &Ask::Cancel(attempt.clone()));
    }
}

/// Opens an evacuation of this name, with a lock where one is kept.
type Open<'a> = dyn FnMut(&str, Option<&Path>) -> Result<(Home, Moves), String> + 'a;

/// Does what a coordinator elsewhere asks on `input`, until that ends. `open` says where the files
/// of an evacuation are, and makes the hands.
///
/// # Errors
/// When nothing can be answered any more.
pub fn serve_hands(
    input: impl BufRead,
    mut output: impl Write,
    open: &mut Open<'_>,
) -> std::io::Result<()> {
    let mut moves: Option<Moves> = None;
    let mut plan: Option<Plan> = None;
    for line in input.lines() {
        let answer = match serde_json::from_str(&line?) {
            Err(error) => Answer::No(format!("not understood, is it of this release? {error}")),
            Ok(Ask::Open(name, directory)) => match open(&name, directory.as_deref()) {
                Ok((home, new)) => {
                    moves = Some(new);
                    Answer::Home(home)
                }
                Err(why) => Answer::No(why),
            },
            Ok(Ask::Plan(new)) => {
                plan = Some(new);
                Answer::Done
            }
            Ok(ask) => match (&mut moves, &plan) {
                (Some(moves), _) if matches!(ask, Ask::Clear) => {
                    moves.clear().map_or_else(Answer::No, |()| Answer::Done)
                }
                (Some(moves), Some(plan)) => done(moves, plan, &ask),
                _ => Answer::No("it was not said what of".to_owned()),
            },
        };
        writeln!(output, "{}", serde_json::to_string(&answer).unwrap_or_default())?;
        output.flush()?;
    }
    Ok(())
}

fn done(moves: &mut Moves, plan: &Plan, ask: &Ask) -> Answer {
    let known =
        |attempt: &Attempt| attempt.vm < plan.vms.len() && attempt.to < plan.destinations.len();
    match ask {
        Ask::Begin(attempt, _)
        | Ask::Look(attempt)
        | Ask::Pace(attempt, _)
        | Ask::Cancel(attempt)
            if !known(attempt) =>
        {
            Answer::No("there is no such VM in the plan".to_owned())
        }
        Ask::Begin(attempt, rate) => {
            let begun = moves.begin(plan, attempt, Rate::from_bytes_per_second(*rate));
            begun.map_or_else(Answer::No, |()| Answer::Done)
        }
        Ask::Look(attempt) => Answer::Seen(moves.look(plan, attempt)),
        Ask::Pace(attempt, rate) => {
            if moves.pace(plan, attempt, Rate::from_bytes_per_second(*rate)) {
                Answer::Done
            } else {
                Answer::No("it cannot be told".to_owned())
            }
        }
        Ask::Cancel(attempt) => {
            moves.cancel(plan, attempt);
            Answer::Done
        }
        Ask::Open(..) | Ask::Clear | Ask::Plan(_) => Answer::Done,
    }
}
