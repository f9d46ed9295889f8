//! A monitor that libvirt holds: commands go through its daemon to QEMU, and QEMU's events come
//! back through it.
//!
//! Three commands change what libvirt knows of the domain, and libvirt is told to do them: `stop`
//! suspends the domain, `cont` resumes it, `quit` destroys it. All others are QEMU's.
//!
//! Libvirt's calls have no time limit, so a thread of its own makes them, one after the other; who
//! gives up on an answer leaves it to be passed over when it comes. A daemon that was started anew
//! is connected to again at the next command.
//!
//! Invariant: a command that may have been carried out is not given a second time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use godwit_libvirt::{Connection, Domain, ErrorKind, LibvirtError, State, Subscription};
use procfs::process::Process;
use rustix::process::Pid;
use serde_json::{Value, json};

use super::commands::{QueryCpus, QueryVersion};
use super::events::EventQueue;
use super::{Event, Handle, Monitor, Patience, QmpError, Queued, STEP, Seen, Version};

/// How often a daemon that is gone is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// A domain, by the daemon that has it and its UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DomainName {
    pub(crate) uri: String,
    pub(crate) uuid: String,
}

/// A command on its way, and until when the daemon is tried.
struct Job {
    id: u64,
    command: String,
    arguments: Value,
    descriptor: Option<OwnedFd>,
    until: Instant,
}

/// The monitor of a domain's QEMU.
#[derive(Debug)]
pub(crate) struct LibvirtMonitor {
    name: DomainName,
    jobs: Sender<Job>,
    answers: Receiver<(u64, Result<Value, QmpError>)>,
    heard: Receiver<godwit_libvirt::Event>,
    events: EventQueue,
    next_id: u64,
    version: Version,
    pid: Option<Pid>,
    patience: Patience,
}

impl LibvirtMonitor {
    /// The monitor of a domain of whose QEMU the process is known. Asks QEMU nothing: libvirt may
    /// be at work with it.
    ///
    /// # Errors
    /// When libvirt does not know the domain.
    pub(crate) fn of(domain: &Domain, pid: i32) -> Result<Self, QmpError> {
        let number = domain.connection().hypervisor_version().unwrap_or_default();
        let version = (number / 1_000_000, number / 1000 % 1000, number % 1000);
        let mut monitor = Self::begin(domain)?;
        (monitor.version, monitor.pid) = (version, Pid::from_raw(pid));
        Ok(monitor)
    }

    /// The monitor of a running domain, whose QEMU is asked for its version and its process.
    ///
    /// # Errors
    /// When QEMU does not answer, or does not run on this host.
    pub(crate) fn open(domain: &Domain) -> Result<Self, QmpError> {
        let mut monitor = Self::begin(domain)?;
        let own: &mut dyn Monitor = &mut monitor;
        let version = own.run(&QueryVersion)?.qemu;
        let cpus = own.run(&QueryCpus)?;
        monitor.version = (version.major, version.minor, version.micro);
        let of_uuid = |pid: &Pid| is_qemu_of(pid.as_raw_nonzero().get(), &monitor.name.uuid);
        let threads = cpus.iter().filter_map(|cpu| i32::try_from(cpu.thread_id).ok());
        monitor.pid = threads.filter_map(process_of).find(of_uuid);
        match monitor.pid {
            Some(_) => Ok(monitor),
            None => Err(QmpError::Elsewhere { uri: monitor.name.uri }),
        }
    }

    /// The domain called `name`, which may not be there for a while.
    ///
    /// # Errors
    /// When libvirt is not there, or has no such domain.
    pub(crate) fn find(name: &DomainName, pid: i32) -> Result<Self, QmpError> {
        let found = Connection::open(&name.uri).and_then(|host| host.domain_by_uuid(&name.uuid));
        Self::of(&found.map_err(|error| lost("connecting", &error))?, pid)
    }

    fn begin(domain: &Domain) -> Result<Self, QmpError> {
        let failed = |error: LibvirtError| lost("connecting", &error);
        let uri = domain.connection().uri().to_owned();
        let name = DomainName { uri, uuid: domain.uuid().map_err(failed)? };
        let (jobs, todo) = channel::<Job>();
        let (done, answers) = channel();
        let (to, heard) = channel();
        let mut worker = Worker { name: name.clone(), link: None, events: to };
        worker.link = Some(worker.connect().map_err(failed)?);
        let thread = std::thread::Builder::new().name("libvirt".to_owned()).spawn(move || {
            for job in todo {
                let (id, answer) = (job.id, worker.carry_out(job));
                if done.send((id, answer)).is_err() {
                    return;
                }
            }
        });
        thread.map_err(|source| QmpError::Io { during: "connecting".to_owned(), source })?;
        Ok(Self {
            name,
            jobs,
            answers,
            heard,
            events: EventQueue::default(),
            next_id: 0,
            version: (0, 0, 0),
            pid: None,
            patience: Patience::default(),
        })
    }

    fn keep(&mut self, event: godwit_libvirt::Event) {
        let data = event.details.as_deref().and_then(|text| serde_json::from_str(text).ok());
        self.events.push(Event::emitted(event.name, data.unwrap_or_default(), event.emitted));
    }
}

/// The process that a thread belongs to, as both are numbered here.
fn process_of(thread: i32) -> Option<Pid> {
    Pid::from_raw(Process::new(thread).ok()?.status().ok()?.tgid)
}

/// Whether process `pid` was started as the QEMU of the domain `uuid`.
pub(crate) fn is_qemu_of(pid: i32, uuid: &str) -> bool {
    let words = Process::new(pid).and_then(|process| process.cmdline()).unwrap_or_default();
    words.windows(2).any(|pair| pair[0] == "-uuid" && pair[1] == uuid)
}

fn lost(during: &str, error: &LibvirtError) -> QmpError {
    QmpError::Libvirt { during: during.to_owned(), words: error.to_string() }
}

/// Makes the calls.
struct Worker {
    name: DomainName,
    link: Option<Link>,
    events: Sender<godwit_libvirt::Event>,
}

struct Link {
    domain: Domain,
    _events: Subscription,
}

impl Worker {
    /// A connection of its own, on which nobody else's calls stand in line.
    fn connect(&self) -> Result<Link, LibvirtError> {
        let host = Connection::open(&self.name.uri)?;
        let domain = host.domain_by_uuid(&self.name.uuid)?;
        let events = domain.tell_events(self.events.clone())?;
        Ok(Link { domain, _events: events })
    }

    /// The domain, over a connection that stands.
    fn domain(&mut self, until: Instant) -> Result<&Domain, LibvirtError> {
        let stands = self.link.as_ref().is_some_and(|it| it.domain.connection().is_alive());
        if !stands {
            self.link = None;
            loop {
                match self.connect() {
                    Ok(link) => break self.link = Some(link),
                    // A daemon that has just begun may not have looked at its domains yet.
                    Err(error) if Instant::now() >= until => return Err(error),
                    Err(_) => std::thread::sleep(RETRY),
                }
            }
        }
        self.link.as_ref().map(|link| &link.domain).ok_or_else(|| LibvirtError::Connect {
            uri: self.name.uri.clone(),
            words: "it is gone".to_owned(),
        })
    }

    fn carry_out(&mut self, job: Job) -> Result<Value, QmpError> {
        let Job { command, arguments, descriptor, until, .. } = job;
        let domain = self.domain(until).map_err(|error| lost(&command, &error))?;
        let done = match command.as_str() {
            "stop" => domain.suspend().map(|()| json!({})),
            "cont" => domain.resume().map(|()| json!({})),
            "quit" => domain.destroy().map(|()| json!({})),
            _ => {
                let mut request = json!({ "execute": command });
                if !arguments.is_null() {
                    request["arguments"] = arguments;
                }
                let descriptor = descriptor.as_ref().map(AsFd::as_fd);
                let answer = domain.monitor(&request.to_string(), descriptor);
                match answer.map(|text| serde_json::from_str::<Value>(&text)) {
                    Ok(Ok(answer)) => return read(&command, answer),
                    Ok(Err(error)) => {
                        return Err(QmpError::Io { during: command, source: error.into() });
                    }
                    Err(error) => Err(error),
                }
            }
        };
        done.map_err(|error| failure(domain, command, &error))
    }
}

/// QEMU's answer, or its refusal.
fn read(command: &str, mut answer: Value) -> Result<Value, QmpError> {
    match answer.get("error") {
        Some(error) => Err(QmpError::refused(command, error)),
        None => Ok(answer["return"].take()),
    }
}

/// What a call of libvirt's failed with: because QEMU has ended, because libvirt is gone, or
/// because it refused.
fn failure(domain: &Domain, command: String, error: &LibvirtError) -> QmpError {
    if !domain.connection().is_alive() {
        return lost(&command, error);
    }
    match domain.state() {
        Ok(State::ShutOff) => QmpError::Closed { during: command },
        Err(gone) if gone.kind() == ErrorKind::NoDomain => QmpError::Closed { during: command },
        _ => {
            let (class, description) = ("libvirt".to_owned(), error.words());
            QmpError::Refused { command, class, description }
        }
    }
}

impl Monitor for LibvirtMonitor {
    fn version(&self) -> Version {
        self.version
    }

    fn peer_pid(&self) -> Result<Pid, QmpError> {
        self.pid.ok_or_else(|| QmpError::Elsewhere { uri: self.name.uri.clone() })
    }

    fn handle(&self) -> io::Result<Handle> {
        Ok(Handle::Domain(self.name.clone()))
    }

    fn is_libvirts(&self) -> bool {
        true
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
        let io = |source| QmpError::Io { during: command.to_owned(), source };
        self.next_id += 1;
        let (id, command_text) = (self.next_id, command.to_owned());
        let descriptor = fd.map(|fd| fd.try_clone_to_owned()).transpose().map_err(io)?;
        let until = Instant::now() + self.patience.limit;
        let job = Job { id, command: command_text.clone(), arguments, descriptor, until };
        self.jobs.send(job).map_err(|_| io(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Queued { id, command: command_text })
    }

    fn answer(&mut self, queued: &Queued, limit: Duration) -> Result<Value, QmpError> {
        let during = || queued.command.clone();
        let deadline = Instant::now() + limit;
        loop {
            if self.patience.interrupt.is_raised() {
                return Err(QmpError::Interrupted { during: during() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(left.min(STEP)) {
                Ok((id, answer)) if id == queued.id => return answer,
                // The late answer to a command that was given up on.
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(QmpError::Timeout { during: during(), limit });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let source = io::ErrorKind::BrokenPipe.into();
                    return Err(QmpError::Io { during: during(), source });
                }
            }
        }
    }

    fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        while let Ok(event) = self.heard.try_recv() {
            self.keep(event);
        }
        Ok(self.events.take())
    }

    fn watch(
        &mut self,
        what: &str,
        limit: Duration,
        look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError> {
        let deadline = Instant::now() + limit;
        self.events.begin_wait();
        loop {
            if let Some(event) = self.events.find(look) {
                return Ok(event);
            }
            if self.patience.interrupt.is_raised() {
                return Err(QmpError::Interrupted { during: what.to_owned() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(QmpError::Timeout { during: what.to_owned(), limit });
            }
            if let Ok(event) = self.heard.recv_timeout(left.min(STEP)) {
                self.keep(event);
            }
        }
    }
}
