//! The end that asks.
//!
//! A connection that is lost while a destination is followed is made again: the godwitd may have
//! been killed and started anew, and what it had started goes on meanwhile.

use std::fmt;
use std::io::Write;
use std::str::FromStr;
use std::time::{Duration, Instant};

use godwit_engine::Cancel;
use godwit_engine::address::{Address, Stream};
use godwit_engine::limits;
use godwit_engine::security::SecurityWish;
use serde_json::Value;

use crate::lines::{LineError, Lines};
use crate::messages::{Answer, Guest, LONGEST_ANSWER, PORT, Request};

/// An answer that takes no guest in: godwitd asks programs of its host for some.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// A godwitd that was lost is looked for that long.
const BACK_LIMIT: Duration = Duration::from_secs(60);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(200);
/// A destination that was told to end does so within this time.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// Nobody could be asked.
    #[error("{host}: {why}")]
    Unreachable {
        /// Whom.
        host: String,
        /// Why.
        why: String,
    },
    /// It was refused.
    #[error("{host} refused: {why}")]
    Refused {
        /// By whom.
        host: String,
        /// Why.
        why: String,
    },
}

/// Where a godwitd is asked, and by which of its ways a guest is to come.
///
/// ```
/// use godwit_daemon::client::HostAddress;
///
/// let address: HostAddress = "godwitd://east.example/libvirt".parse()?;
/// assert_eq!(address.to_string(), "godwitd://east.example:7790/libvirt");
/// assert_eq!(address.name(), "east.example");
/// assert!("east.example".parse::<HostAddress>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    address: Address,
    way: Option<String>,
}

impl FromStr for HostAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no host: write godwitd://HOST, godwitd://HOST:PORT or \
                 godwitd://HOST:PORT/WAY, or unix:PATH for the socket of this host's"
            )
        };
        if text.starts_with("unix:") {
            let address = text.parse().map_err(|_| wrong())?;
            return Ok(Self { address, way: None });
        }
        let rest = text.strip_prefix("godwitd://").ok_or_else(wrong)?;
        let (at, way) = match rest.split_once('/') {
            Some((_, "")) => return Err(wrong()),
            Some((at, way)) => (at, Some(way.to_owned())),
            None => (rest, None),
        };
        let with_port = at.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let at = if with_port { at.to_owned() } else { format!("{at}:{PORT}") };
        match at.parse() {
            Ok(address @ Address::Tcp(_)) => Ok(Self { address, way }),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.address, &self.way) {
            (Address::Tcp(at), Some(way)) => write!(f, "godwitd://{at}/{way}"),
            (Address::Tcp(at), None) => write!(f, "godwitd://{at}"),
            (other, _) => write!(f, "{other}"),
        }
    }
}

impl HostAddress {
    /// What the host is called in it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.address.host().unwrap_or("localhost")
    }
}

/// Asks one godwitd.
#[derive(Clone, Debug)]
pub struct Client {
    host: HostAddress,
    wish: SecurityWish,
}

/// A request that was made, and its answers.
struct Conversation {
    host: String,
    stream: Stream,
    lines: Lines,
}

impl Conversation {
    fn next(&mut self, until: Instant, cancel: &Cancel) -> Result<Answer, LineError> {
        let line = self.lines.next(&mut self.stream, until, || cancel.is_cancelled())?;
        serde_json::from_slice(&line).map_err(|error| {
            let words = format!("answers what is not understood: {error}");
            LineError::Broken(std::io::Error::other(words))
        })
    }
}

/// How a guest was taken in.
#[derive(Debug)]
pub struct Ended {
    /// The last line with an outcome.
    pub outcome: Option<Value>,
    /// What the destination complained of.
    pub error: Option<String>,
}

impl Client {
    /// Of the godwitd at `host`, with connections as `wish` has them.
    #[must_use]
    pub fn new(host: HostAddress, wish: SecurityWish) -> Self {
        Self { host, wish }
    }

    fn unreachable(&self, why: impl fmt::Display) -> HostError {
        HostError::Unreachable { host: self.host.to_string(), why: why.to_string() }
    }

    fn open(&self, request: &Request) -> Result<Conversation, HostError> {
        let address = &self.host.address;
        let security = self.wish.source(address).map_err(|error| self.unreachable(error))?;
        let mut stream = Stream::connect(address).map_err(|error| {
            self.unreachable(format!("cannot be reached: {error}; does godwitd run there?"))
        })?;
        let secured = security.secure(&mut stream, &self.host.to_string(), limits::WORDS, || false);
        secured.map_err(|error| self.unreachable(error))?;
        let mut line = request.line();
        line.push('\n');
        stream.write_all(line.as_bytes()).map_err(|error| self.unreachable(error))?;
        let host = self.host.to_string();
        Ok(Conversation { host, stream, lines: Lines::new(LONGEST_ANSWER) })
    }

    /// Asks for something that has one answer.
    ///
    /// # Errors
    /// When it is refused, or nobody answers.
    pub fn ask(&self, request: &Request) -> Result<Answer, HostError> {
        let mut conversation = self.open(request)?;
        let until = Instant::now() + ANSWER_LIMIT;
        match conversation.next(until, &Cancel::default()) {
            Ok(Answer::Refused { error: why }) => {
                Err(HostError::Refused { host: conversation.host, why })
            }
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.unreachable(format!("does not answer: {error}"))),
        }
    }

    /// Has a guest taken in, as destination `id`, and tells each line that this says, until its
    /// end. Where it listens is told as seen from here. A `cancel` ends the destination.
    ///
    /// # Errors
    /// When it is refused, or the godwitd is lost for longer than a restart takes.
    pub fn receive(
        &self,
        id: &str,
        vm: &Guest,
        cancel: &Cancel,
        tell: &mut dyn FnMut(&Value),
    ) -> Result<Ended, HostError> {
        let first =
            Request::Receive { id: id.to_owned(), vm: vm.clone(), way: self.host.way.clone() };
        let mut known = Known { lines: 0, taken: false, host: None, outcome: None };
        // None before the first answer: who cannot be reached at all is told so at once.
        let mut lost: Option<Instant> = None;
        loop {
            let request = match known.taken {
                false => first.clone(),
                true => Request::Follow { id: id.to_owned(), from: known.lines },
            };
            let error = match self.open(&request) {
                Ok(mut conversation) => {
                    match self.follow(&mut conversation, &mut known, id, cancel, tell) {
                        Ok(ended) => return Ok(ended),
                        Err(error @ HostError::Refused { .. }) => return Err(error),
                        Err(error) => {
                            lost = Some(Instant::now());
                            error
                        }
                    }
                }
                Err(error) if lost.is_none() => return Err(error),
                Err(error) => error,
            };
            if cancel.is_cancelled() || lost.is_none_or(|lost| lost.elapsed() > BACK_LIMIT) {
                return Err(error);
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// What the destination says over one connection.
    fn follow(
        &self,
        conversation: &mut Conversation,
        known: &mut Known,
        id: &str,
        cancel: &Cancel,
        tell: &mut dyn FnMut(&Value),
    ) -> Result<Ended, HostError> {
        let mut stopped: Option<Instant> = None;
        let never = Cancel::default();
        loop {
            if cancel.is_cancelled() && stopped.is_none() {
                self.ask(&Request::Stop { id: id.to_owned() })?;
                stopped = Some(Instant::now());
            }
            // Once it was told to end, what it still says is waited for.
            let (until, cancel) = match stopped {
                None => (Instant::now() + limits::ENDLESS, cancel),
                Some(at) => (at + STOP_LIMIT, &never),
            };
            match conversation.next(until, cancel) {
                Ok(Answer::Taken { host, .. }) => {
                    known.taken = true;
                    known.host = host;
                }
                Ok(Answer::Said { n, line }) => {
                    known.lines = n;
                    let line = self.seen_from_here(line, known.host.as_deref());
                    if line["outcome"].is_string() {
                        known.outcome = Some(line.clone());
                    }
                    tell(&line);
                }
                Ok(Answer::Ended { error }) => {
                    return Ok(Ended { outcome: known.outcome.take(), error });
                }
                Ok(Answer::Refused { error: why }) => {
                    return Err(HostError::Refused { host: conversation.host.clone(), why });
                }
                Ok(_) => return Err(self.unreachable("answers something else")),
                Err(LineError::Late) if stopped.is_none() && cancel.is_cancelled() => {}
                Err(error) => return Err(self.unreachable(error)),
            }
        }
    }

    /// A line with the address at which this host reaches the destination.
    fn seen_from_here(&self, mut line: Value, host: Option<&str>) -> Value {
        let told = line["address"].as_str().and_then(|at| at.rsplit_once(':'));
        let port = told.map(|(_, port)| port.to_owned());
        let host = host.or(self.host.address.host());
        if let (true, Some(port), Some(host)) = (line["event"] == "listening", port, host) {
            line["address"] = format!("{host}:{port}").into();
        }
        line
    }
}

/// What is known of a destination that is followed.
struct Known {
    lines: usize,
    taken: bool,
    host: Option<String>,
    outcome: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_written_in_one_way() {
        for (text, shown) in [
            ("godwitd://east", "godwitd://east:7790"),
            ("godwitd://east:1", "godwitd://east:1"),
            ("godwitd://[::1]:1/qemu", "godwitd://[::1]:1/qemu"),
            ("godwitd://[::1]", "godwitd://[::1]:7790"),
            ("unix:/run/godwit/godwitd", "unix:/run/godwit/godwitd"),
        ] {
            assert_eq!(text.parse::<HostAddress>().unwrap().to_string(), shown);
        }
        for text in
            ["", "east:1", "godwitd://", "godwitd://:1", "godwitd://a/", "http://a", "unix:"]
        {
            assert!(text.parse::<HostAddress>().unwrap_err().contains("godwitd://HOST"), "{text}");
        }
    }

    #[test]
    fn a_destination_is_told_by_the_name_that_its_host_was_asked_by() {
        let client = Client::new("godwitd://east:1".parse().unwrap(), SecurityWish::default());
        let line = |host| {
            let line = serde_json::json!({ "event": "listening", "address": "0.0.0.0:41234" });
            client.seen_from_here(line, host)["address"].as_str().unwrap().to_owned()
        };
        assert_eq!(line(None), "east:41234");
        assert_eq!(line(Some("10.0.0.7")), "10.0.0.7:41234");
        let other = serde_json::json!({ "event": "asked", "address": "a:1" });
        assert_eq!(client.seen_from_here(other.clone(), None), other);
    }
}
