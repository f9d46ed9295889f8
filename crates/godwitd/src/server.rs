//! Listens, knows who asks, and answers: one request a connection.
//!
//! Invariants: nothing of a peer is read before its certificate was found good, where there are
//! keys; a request has a limit of its size and one of its time; so many connections at once are
//! greeted, and so many followed, whoever comes.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use godwit_daemon::lines::{LineError, Lines};
use godwit_daemon::messages::{Answer, LONGEST_REQUEST, Request};
use godwit_engine::address::{Address, Listener, Stream};
use godwit_engine::security::Security;
use godwit_engine::{Cancel, limits};
use godwit_qemu::run_directory;
use godwit_report::{Side, Store};
use godwit_terminal::say;

use crate::config::Config;
use crate::destinations::{Asker, Destinations};
use crate::handed::Handed;
use crate::metrics::{self, Counts};
use crate::program::Program;

/// Until a request is there.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Connections at once that have not been answered.
const MOST_ASKING: usize = 32;
/// Connections at once over which a destination is followed.
const MOST_FOLLOWING: usize = 256;
/// Destinations that are followed are looked at this often.
const LOOK: Duration = Duration::from_millis(50);
/// Destinations that end with godwitd are followed to their end, for this time at most.
const FAREWELL: Duration = Duration::from_secs(2);
/// Who was told no has this time to hear it.
const PARTING: Duration = Duration::from_secs(1);
/// Names of records in a list.
const RECORDS: usize = 200;

/// What every connection knows.
struct Host {
    config: Config,
    destinations: Arc<Destinations>,
    program: Program,
    cancel: Cancel,
    counts: Counts,
    asking: AtomicUsize,
    following: AtomicUsize,
}

/// Listens until it is cancelled; dropped then, it has answered.
pub(crate) struct Server {
    host: Arc<Host>,
    listening: Vec<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // The file of the operator's socket goes with the thread that listens there, unless it was
        // handed over.
        self.listening.drain(..).for_each(|thread| drop(thread.join()));
        // Who follows a destination hears of its end.
        let until = Instant::now() + FAREWELL;
        while self.host.following.load(Ordering::Relaxed) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// One of so many, while it lives.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(counter: &'a AtomicUsize, most: usize) -> Option<Self> {
        let taken = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < most).then_some(count + 1)
        });
        taken.ok().map(|_| Self(counter))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Listens where `config` says, at the sockets that were `handed` over where there are any, and
    /// tells where that is.
    ///
    /// # Errors
    /// When an address cannot be listened on.
    pub(crate) fn start(
        config: Config,
        handed: Handed,
        destinations: Arc<Destinations>,
        program: Program,
        cancel: Cancel,
    ) -> anyhow::Result<Self> {
        let own = rustix::process::getuid().as_raw();
        let directory = run_directory::path();
        if config.socket.parent() == Some(&directory) {
            run_directory::make(&directory, own).map_err(anyhow::Error::msg)?;
        }
        let local = Address::Unix(config.socket.clone());
        let listener = handed.operator.map_or_else(|| Listener::bind(&local), Ok);
        let listener = listener.with_context(|| local.to_string())?;
        let remote = match &config.listen {
            None => None,
            Some((address, security)) => {
                let bound = handed.hosts.map_or_else(|| Listener::bind(address), Ok);
                let bound = bound.with_context(|| format!("listen {address}"))?;
                let address = bound.address().with_context(|| address.to_string())?;
                let how = match security {
                    Security::Tls(_) => "",
                    _ => ", unencrypted: any user of this host may ask",
                };
                eprintln!("godwitd: hosts ask at godwitd://{address}{how}");
                Some((bound, security.clone()))
            }
        };
        eprintln!("godwitd: the operator asks at {local}");
        let metrics = config.metrics;
        let host = Arc::new(Host {
            config,
            destinations,
            program,
            cancel,
            counts: Counts::new()?,
            asking: AtomicUsize::new(0),
            following: AtomicUsize::new(0),
        });
        if let Some(address) = metrics {
            let host = Arc::clone(&host);
            let served = metrics::serve(address, move || {
                let destinations = &host.destinations;
                let room = destinations.room(&host.config);
                host.counts.text(&room, &destinations.list(), &host.program)
            });
            eprintln!("godwitd: metrics at http://{}/metrics", served?);
        }
        let mut listening = vec![serve("local", Arc::clone(&host), listener, None)?];
        if let Some((bound, security)) = remote {
            listening.push(serve("hosts", Arc::clone(&host), bound, Some(security))?);
        }
        Ok(Self { host, listening })
    }
}

/// Accepts connections, each answered by a thread of its own.
fn serve(
    name: &str,
    host: Arc<Host>,
    listener: Listener,
    security: Option<Security>,
) -> anyhow::Result<JoinHandle<()>> {
    let accept = move || {
        while !host.cancel.is_cancelled() {
            let accepted = listener.accept(None, || host.cancel.is_cancelled());
            let stream = match accepted {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                // Descriptors are exhausted, most likely: others will end.
                Err(error) => {
                    eprintln!("godwitd: cannot accept: {error}");
                    std::thread::sleep(Duration::from_secs(1));
                    continue;
                }
            };
            let (host, security) = (Arc::clone(&host), security.clone());
            let thread = std::thread::Builder::new().name("asked".to_owned());
            // Who gets no thread finds the connection closed.
            let _ = thread.spawn(move || host.greet(stream, security.as_ref()));
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(accept).context("no thread")
}

impl Host {
    /// One connection, from its beginning.
    fn greet(&self, mut stream: Stream, security: Option<&Security>) {
        let peer = stream.peer();
        let Some(place) = Place::take(&self.asking, MOST_ASKING) else {
            self.counts.refused();
            return;
        };
        let stop = || self.cancel.is_cancelled();
        if let Some(security) = security {
            let secured = security.secure(&mut stream, &peer, limits::GREETING, stop);
            if let Err(error) = secured {
                self.counts.refused();
                eprintln!("godwitd: refused a connection: {}", say::line(error));
                return;
            }
        }
        // Whatever the mode of its file: one that was handed over may be open to all.
        let own = rustix::process::geteuid().as_raw();
        if security.is_none() && stream.user().is_none_or(|user| user != own && user != 0) {
            self.counts.refused();
            let error = "the operator's socket is for root and the user of godwitd".to_owned();
            eprintln!("godwitd: {peer}: {error}");
            let _ = tell(&mut stream, &Answer::Refused { error });
            return part(&mut stream);
        }
        let certificate = stream.shown().map(|shown| godwit_tls::fingerprint(&shown));
        let who = Asker { name: peer, certificate };
        let mut lines = Lines::new(LONGEST_REQUEST);
        let until = Instant::now() + REQUEST_LIMIT;
        let request = match lines.next(&mut stream, until, stop) {
            Ok(line) => Request::parse(&line),
            // Somebody looked whether anybody listens.
            Err(LineError::Ended) => return,
            Err(LineError::TooLong(most)) => Err(format!("a request has {most} bytes at most")),
            Err(LineError::Late) => Err("the request did not come in time".to_owned()),
            Err(_) => return,
        };
        let word = request.as_ref().map_or("none", Request::word);
        let answered = request.and_then(|request| self.answer(&mut stream, request, &who, place));
        self.counts.answered(word, answered.is_ok());
        if let Err(error) = answered {
            eprintln!("godwitd: {} asks for {word}: refused: {}", who.name, say::line(&error));
            let _ = tell(&mut stream, &Answer::Refused { error });
        }
        part(&mut stream);
    }

    /// Does what is asked.
    ///
    /// # Errors
    /// Why not, in one line.
    fn answer(
        &self,
        stream: &mut Stream,
        request: Request,
        who: &Asker,
        place: Place<'_>,
    ) -> Result<(), String> {
        let destinations = &self.destinations;
        let answer = match request {
            Request::Room {} => Answer::Room(destinations.room(&self.config)),
            Request::List {} => self.list(),
            Request::Stop { id } => {
                destinations.stop(&id, who)?;
                eprintln!("godwitd: {} ends destination {id}", who.name);
                Answer::Done
            }
            Request::Follow { id, from } => {
                destinations.know(&id)?;
                let _following = self.follower()?;
                drop(place);
                return self.follow(stream, &id, from);
            }
            Request::Receive { id, vm, way } => {
                let _following = self.follower()?;
                destinations.begin(&self.config, (&id, &vm, way.as_deref()), who)?;
                drop(place);
                eprintln!("godwitd: {} is to come from {}: destination {id}", vm.name, who.name);
                let host = self.config.moves.clone();
                if tell(stream, &Answer::Taken { id: id.clone(), host }).is_ok() {
                    return self.follow(stream, &id, 0);
                }
                return Ok(());
            }
        };
        // Who does not hear it has gone.
        let _ = tell(stream, &answer);
        Ok(())
    }

    fn follower(&self) -> Result<Place<'_>, String> {
        let place = Place::take(&self.following, MOST_FOLLOWING);
        place.ok_or_else(|| format!("{MOST_FOLLOWING} destinations are followed here already"))
    }

    fn list(&self) -> Answer {
        let records = Store::own(rustix::process::geteuid().is_root());
        let records = records.and_then(|store| store.list().ok()).unwrap_or_default();
        Answer::List {
            room: self.destinations.room(&self.config),
            destinations: self.destinations.list(),
            vms: self.program.json(&["list", "--json"]),
            running: self.program.json(&["status", "--json"]),
            records: records
                .into_iter()
                .filter(|kept| kept.side == Side::Source)
                .map(|kept| kept.name)
                .take(RECORDS)
                .collect(),
        }
    }

    /// Tells what a destination says, from its line `from` on, until it has ended or nobody hears
    /// it any more.
    fn follow(&self, stream: &mut Stream, id: &str, from: usize) -> Result<(), String> {
        let (mut told, mut length) = (from, None);
        let mut leaves: Option<Instant> = None;
        while leaves.is_none_or(|until| Instant::now() < until) {
            if self.cancel.is_cancelled() {
                leaves.get_or_insert_with(|| Instant::now() + FAREWELL);
            }
            let now = self.destinations.length(id);
            // Whether it lives is looked at each time, what it has said when there is more of it.
            let said = self.destinations.said(id)?;
            if length.replace(now) != Some(now) || !said.lives {
                for (at, line) in said.lines.iter().enumerate().skip(told) {
                    told = at + 1;
                    if tell(stream, &Answer::Said { n: told, line: line.clone() }).is_err() {
                        return Ok(());
                    }
                }
            }
            if !said.lives {
                let error = self.destinations.complaint(id);
                let _ = tell(stream, &Answer::Ended { error });
                return Ok(());
            }
            match stream.read_until(&mut [0; 64], Instant::now() + LOOK, || false) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // It has gone, or says something where there is nothing to say.
                _ => return Ok(()),
            }
        }
        Ok(())
    }
}

fn tell(stream: &mut Stream, answer: &Answer) -> std::io::Result<()> {
    // Of our own types: it cannot fail.
    let mut line = serde_json::to_string(answer).unwrap_or_default();
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Says nothing more, and waits for a moment until the peer has heard that: who ends a connection
/// of which something is unread takes its own last words along (tcp(7)).
fn part(stream: &mut Stream) {
    stream.shut_down_write();
    let until = Instant::now() + PARTING;
    while matches!(stream.read_until(&mut [0; 4096], until, || false), Ok(1..)) {}
}
