//! A monitor that somebody else wants as well, every now and then: it is connected to for as long
//! as there is something to say, and let go of in between.
//!
//! Proxmox VE connects anew for each of its commands, gives up after five seconds, and has no other
//! monitor. A monitor serves one client at a time and keeps the next one waiting, who is served
//! when the first lets go.
//!
//! Events come only while it is connected. What befalls the guest meanwhile is seen by its run
//! state, which is asked for every now and then, and told as the event that was missed.
//!
//! Invariant: between two commands it is let go of within [`IDLE`], or within [`KEPT`] where a
//! descriptor was handed over that QEMU forgets at the end of a connection, or an answer is still
//! to come; and after [`TURN`] somebody else has a turn.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::Pid;
use serde_json::{Value, json};

use super::commands::QueryStatus;
use super::events::EventQueue;
use super::{Event, Handle, Monitor, Patience, Qmp, QmpError, Queued, STEP, Seen, Version};

/// How long it is kept while nothing is said.
const IDLE: Duration = Duration::from_millis(250);
/// The same while something hangs on the connection.
const KEPT: Duration = Duration::from_secs(2);
/// How long it is kept while commands follow each other.
const TURN: Duration = Duration::from_secs(1);
/// How often the run state is looked at while nothing else is asked.
const LOOK: Duration = Duration::from_secs(2);

/// A monitor by its socket, and the QEMU that is behind it.
#[derive(Debug)]
pub(crate) struct BriefMonitor {
    path: PathBuf,
    pid: Pid,
    version: Version,
    patience: Patience,
    events: EventQueue,
    held: Arc<Mutex<Held>>,
}

/// The connection, where there is one.
#[derive(Debug)]
struct Held {
    qmp: Option<Qmp>,
    since: Instant,
    used: Instant,
    /// When the run state was asked for last.
    looked: Instant,
    /// Descriptors or an answer hang on this connection.
    kept: bool,
    /// What was told over connections that are over.
    events: Vec<Event>,
}

impl Held {
    fn let_go(&mut self) {
        if let Some(mut qmp) = self.qmp.take() {
            // What has come by now is not lost.
            self.events.extend(qmp.take_events().unwrap_or_default());
        }
        self.kept = false;
    }

    /// Does `work` over the connection that there is.
    fn use_it<T>(
        &mut self,
        patience: &Patience,
        during: &str,
        work: impl FnOnce(&mut Qmp, &mut bool) -> Result<T, QmpError>,
    ) -> Result<T, QmpError> {
        let Self { qmp: Some(qmp), kept, .. } = self else {
            return Err(QmpError::Closed { during: during.to_owned() });
        };
        let own = Monitor::patience_mut(qmp);
        own.limit = patience.limit;
        own.interrupt = patience.interrupt.clone();
        let done = work(qmp, kept);
        self.used = Instant::now();
        done
    }

    fn is_over(&self) -> bool {
        self.used.elapsed() > if self.kept { KEPT } else { IDLE }
    }
}

fn lock(held: &Mutex<Held>) -> MutexGuard<'_, Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BriefMonitor {
    /// The monitor at `path`. Who is connected to it is waited for.
    ///
    /// # Errors
    /// When it cannot be had.
    pub(crate) fn open(path: &Path) -> Result<Self, QmpError> {
        let qmp = connect(path, &Patience::default())?;
        let (pid, version, now) = (qmp.peer_pid()?, qmp.version(), Instant::now());
        let held = Held {
            qmp: Some(qmp),
            since: now,
            used: now,
            looked: now,
            kept: false,
            events: Vec::new(),
        };
        let held = Arc::new(Mutex::new(held));
        let watched = Arc::downgrade(&held);
        let thread = std::thread::Builder::new().name("monitor".to_owned());
        let started = thread.spawn(move || let_go_in_time(&watched));
        started.map_err(|source| QmpError::Io { during: "connecting".to_owned(), source })?;
        let (patience, events) = (Patience::default(), EventQueue::default());
        Ok(Self { path: path.to_owned(), pid, version, patience, events, held })
    }

    /// Does `work` over a connection, which is made where there is none.
    fn over<T>(
        &mut self,
        during: &str,
        work: impl FnOnce(&mut Qmp, &mut bool) -> Result<T, QmpError>,
    ) -> Result<T, QmpError> {
        let mut held = lock(&self.held);
        if held.qmp.is_none() {
            let qmp = connect(&self.path, &self.patience)?;
            // Another QEMU may have come to that name.
            if qmp.peer_pid()? != self.pid {
                return Err(QmpError::Closed { during: during.to_owned() });
            }
            (held.qmp, held.since) = (Some(qmp), Instant::now());
        }
        held.use_it(&self.patience, during, work)
    }

    /// Lets somebody else have a turn, if it was kept for long.
    fn take_turns(&self) {
        let mut held = lock(&self.held);
        if !held.kept && held.since.elapsed() > TURN {
            held.let_go();
        }
    }

    fn collect(&mut self) {
        let events = std::mem::take(&mut lock(&self.held).events);
        events.into_iter().for_each(|event| self.events.push(event));
    }

    /// Asks for the run state, and tells it as the event that it comes of.
    fn look(&mut self) -> Result<(), QmpError> {
        lock(&self.held).looked = Instant::now();
        let own: &mut dyn Monitor = self;
        let name = match own.run(&QueryStatus)?.status.as_str() {
            "shutdown" => "SHUTDOWN",
            "guest-panicked" => "GUEST_PANICKED",
            _ => return Ok(()),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.events.push(Event::emitted(name.to_owned(), json!({}), now));
        Ok(())
    }
}

/// Connects within the time that a command may take, whoever is connected meanwhile.
fn connect(path: &Path, patience: &Patience) -> Result<Qmp, QmpError> {
    let until = Instant::now() + patience.limit;
    loop {
        match Qmp::connect(path) {
            Err(QmpError::NoGreeting { .. })
                if Instant::now() < until && !patience.interrupt.is_raised() => {}
            connected => return connected,
        }
    }
}

/// Lets go of a connection that nothing is said over, for as long as somebody may.
fn let_go_in_time(held: &Weak<Mutex<Held>>) {
    while let Some(held) = held.upgrade() {
        // Who has the lock uses the connection.
        if let Ok(mut held) = held.try_lock()
            && held.qmp.is_some()
            && held.is_over()
        {
            held.let_go();
        }
        drop(held);
        std::thread::sleep(STEP);
    }
}

impl Monitor for BriefMonitor {
    fn version(&self) -> Version {
        self.version
    }

    fn peer_pid(&self) -> Result<Pid, QmpError> {
        Ok(self.pid)
    }

    fn handle(&self) -> io::Result<Handle> {
        Ok(Handle::Path(self.path.clone()))
    }

    fn is_lasting(&self) -> bool {
        false
    }

    fn patience(&self) -> &Patience {
        &self.patience
    }

    fn patience_mut(&mut self) -> &mut Patience {
        &mut self.patience
    }

    fn queue(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Queued, QmpError> {
        self.take_turns();
        self.over(command, |qmp, kept| {
            let queued = qmp.queue(command, arguments, fd)?;
            *kept = true;
            Ok(queued)
        })
    }

    fn answer(&mut self, queued: &Queued, limit: Duration) -> Result<Value, QmpError> {
        let hands_over = matches!(queued.command.as_str(), "getfd" | "add-fd");
        // Over a connection that is made anew no answer comes.
        lock(&self.held).use_it(&self.patience, &queued.command, |qmp, kept| {
            let answer = qmp.answer(queued, limit);
            *kept = hands_over;
            answer
        })
    }

    fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        let (connected, looked) = {
            let held = lock(&self.held);
            (held.qmp.is_some(), held.looked)
        };
        if connected {
            let told = match &mut lock(&self.held).qmp {
                Some(qmp) => qmp.take_events()?,
                None => Vec::new(),
            };
            self.collect();
            told.into_iter().for_each(|event| self.events.push(event));
        } else if looked.elapsed() > LOOK {
            self.look()?;
        }
        self.collect();
        Ok(self.events.take())
    }

    fn watch(
        &mut self,
        what: &str,
        limit: Duration,
        look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError> {
        self.collect();
        self.events.begin_wait();
        if let Some(event) = self.events.find(look) {
            return Ok(event);
        }
        self.over(what, |qmp, _| Monitor::watch(qmp, what, limit, look))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;
    use crate::monitor::commands::Quit;

    /// A monitor that serves one client after the other, and answers everything.
    fn serve(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::Builder::new()
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    let greeting = "{\"QMP\": {\"version\": {\"qemu\": {\"major\": 9, \
                                    \"minor\": 0, \"micro\": 0}}}}\n";
                    let mut writer = stream.try_clone().unwrap();
                    let _ = writer.write_all(greeting.as_bytes());
                    for line in BufReader::new(stream).lines().map_while(Result::ok) {
                        let request: Value = serde_json::from_str(&line).unwrap();
                        let answer = match request["execute"].as_str() {
                            Some("query-status") => json!({ "status": "shutdown" }),
                            _ => json!({}),
                        };
                        let answer = json!({ "return": answer, "id": request["id"] });
                        let _ = writeln!(writer, "{answer}");
                    }
                }
            })
            .unwrap();
        path
    }

    /// How long another client waits for the greeting.
    fn wait_of_another(path: &Path) -> Duration {
        let began = Instant::now();
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        began.elapsed()
    }

    #[test]
    fn another_client_is_served_between_commands_and_in_its_turn() {
        let path = serve("brief-turns");
        let mut monitor = BriefMonitor::open(&path).unwrap();
        let own: &mut dyn Monitor = &mut monitor;
        own.run(&Quit).unwrap();
        // Mutation: a connection that is kept makes this wait for ever.
        assert!(wait_of_another(&path) < Duration::from_secs(3));
        // And it is there again for the next one, though commands follow each other.
        let until = Instant::now() + Duration::from_secs(4);
        let waiting = path.clone();
        let other = std::thread::Builder::new().spawn(move || wait_of_another(&waiting)).unwrap();
        while Instant::now() < until && !other.is_finished() {
            own.run(&Quit).unwrap();
        }
        assert!(other.join().unwrap() < Duration::from_secs(3));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_befell_the_guest_while_nobody_listened_is_seen_by_its_run_state() {
        let path = serve("brief-events");
        let mut monitor = BriefMonitor::open(&path).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        let mut told = Vec::new();
        while told.is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            told = monitor.take_events().unwrap();
        }
        assert_eq!(told.first().map(|event| event.name.as_str()), Some("SHUTDOWN"));
        std::fs::remove_file(path).unwrap();
    }
}
