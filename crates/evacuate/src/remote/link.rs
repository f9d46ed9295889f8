//! The way to a godwit on another host: a command, with one question at a time on its input and an
//! answer to each on its output.
//!
//! Invariant: nobody waits for the command longer than he meant to, whether it hangs, ends, or says
//! nothing of use; an answer that comes late is still the answer to what was asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Answer, Ask};

/// Until an answer: a destination may take half a minute to listen, and a guest to be found again.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// An answer may name all virtual machines of a host.
const LONGEST: u64 = 16 << 20;
/// How much is repeated of an answer that is none.
const QUOTED: usize = 80;
/// A command that was killed is waited for, and so are its last words: not where it belongs to
/// another user, or has left its output to others.
const END_LIMIT: Duration = Duration::from_millis(300);

/// How often a command is looked at that does not answer.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Link {
    /// Until it was ended.
    child: Option<Child>,
    /// Written by a thread of its own: a command that hangs may not take them.
    questions: Option<Sender<String>>,
    answers: Receiver<String>,
    /// What the command complained of last.
    words: Arc<Mutex<String>>,
    /// What was asked and not answered yet, and when.
    asked: Option<(Ask, Instant)>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}

impl Link {
    pub(super) fn start(command: &[String]) -> Result<Self, String> {
        let (program, words) = command.split_first().ok_or("there is no command")?;
        let mut child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is the coordinator's, which needs it to cancel what is under way.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("{program} does not start: {error}"))?;
        let mut input = child.stdin.take().ok_or("it has no input")?;
        let output = child.stdout.take().ok_or("it has no output")?;
        let errors = child.stderr.take().ok_or("it has no output for errors")?;
        let ((questions, asked), (sender, answers)) = (channel::<String>(), sync_channel(1));
        let link = Self {
            child: Some(child),
            questions: Some(questions),
            answers,
            words: Arc::default(),
            asked: None,
        };
        thread(move || {
            for line in asked {
                if input.write_all(line.as_bytes()).and_then(|()| input.flush()).is_err() {
                    return;
                }
            }
        })?;
        thread(move || each_line(output, |line| sender.send(line).is_ok()))?;
        let last = Arc::clone(&link.words);
        thread(move || {
            each_line(errors, |line| {
                if !line.trim().is_empty() {
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = line;
                }
                true
            });
        })?;
        Ok(link)
    }

    /// What it was asked and has not answered, and when.
    pub(super) fn asked(&self) -> Option<&(Ask, Instant)> {
        self.asked.as_ref()
    }

    /// Asks, behind the answer to what was asked before.
    pub(super) fn put(&mut self, ask: Ask) -> Result<(), String> {
        let line = serde_json::to_string(&ask).map_err(|error| error.to_string())?;
        let sent = self.questions.as_ref().map(|questions| questions.send(line + "\n"));
        if !matches!(sent, Some(Ok(()))) {
            return Err(self.last_words());
        }
        self.asked = Some((ask, Instant::now()));
        Ok(())
    }

    /// What was asked with its answer; nothing if that is still to come behind `until`.
    pub(super) fn hear(&mut self, until: Instant) -> Result<Option<(Ask, Answer)>, String> {
        let Some((_, since)) = &self.asked else { return Ok(None) };
        let late = *since + ANSWER_LIMIT;
        let until = until.min(late);
        loop {
            // What it has left behind may have its output, so that this does not end with it.
            let has_ended = !self.child.as_mut().is_some_and(is_alive);
            let left = until.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(if has_ended { END_LIMIT } else { left.min(LOOK) }) {
                Ok(line) => {
                    let answer = serde_json::from_str(&line).map_err(|_| {
                        let quoted: String = line.chars().take(QUOTED).collect();
                        format!("'{quoted}' is no answer: is that godwit of this release?")
                    })?;
                    return Ok(self.asked.take().map(|(ask, _)| (ask, answer)));
                }
                Err(RecvTimeoutError::Timeout) if !has_ended && Instant::now() < late => {
                    if Instant::now() >= until {
                        return Ok(None);
                    }
                }
                Err(_) => return Err(self.last_words()),
            }
        }
    }

    /// Why it does not answer.
    fn last_words(&mut self) -> String {
        self.end();
        let until = Instant::now() + END_LIMIT;
        // The thread that reads them has its own until it is done.
        while Arc::strong_count(&self.words) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let words = words.trim().trim_start_matches("godwit: ");
        if words.is_empty() { SILENT.to_owned() } else { words.to_owned() }
    }

    /// It ends with its input; what only carries it (ssh) might not.
    fn end(&mut self) {
        self.questions = None;
        let Some(mut child) = self.child.take() else { return };
        let _ = child.kill();
        let until = Instant::now() + END_LIMIT;
        while is_alive(&mut child) {
            if Instant::now() >= until {
                // Whenever it ends, somebody has to take notice.
                let _ = thread(move || drop(child.wait()));
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn is_alive(child: &mut Child) -> bool {
    matches!(child.try_wait(), Ok(None))
}

/// Said of a command that says nothing.
pub(super) const SILENT: &str = "it does not answer";

fn thread(run: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let thread = std::thread::Builder::new().name("hands".to_owned()).spawn(run);
    thread.map(drop).map_err(|error| format!("no thread can be had: {error}"))
}

/// Hands on each line until there is none, or `take` wants no more.
fn each_line(from: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(read) if read > 0 => {}
            _ => return,
        }
        if !take(String::from_utf8_lossy(&line).trim_end().to_owned()) {
            return;
        }
    }
}
