//! A domain, what is asked of it and done with it, and the events of its QEMU.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use crate::connection::{Connection, Inner};
use crate::error::{ErrorKind, LibvirtError};
use crate::library::{
    BlockInfo, ConnectPtr, DomainPtr, JobInfo, Library, c_text, own_text, text as c_text_of,
};

/// A UUID as text, with its NUL (VIR_UUID_STRING_BUFLEN).
const UUID_LENGTH: usize = 37;
/// VIR_MEMORY_PHYSICAL.
const PHYSICAL: c_uint = 2;

/// VIR_CONNECT_LIST_DOMAINS_ACTIVE and ..._INACTIVE.
const ALL_DOMAINS: u32 = 3;

/// Which description of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xml {
    /// Of the domain that runs, as another host can start it; with passwords.
    Migratable,
    /// Of what is started the next time; with passwords.
    Inactive,
    /// Of the domain as it runs here, with the names of its devices in QEMU.
    Running,
}

impl Xml {
    /// VIR_DOMAIN_XML_SECURE, with ..._MIGRATABLE, ..._INACTIVE or neither.
    fn flags(self) -> c_uint {
        match self {
            Self::Migratable => 1 | 8,
            Self::Inactive => 1 | 2 | 8,
            Self::Running => 1,
        }
    }
}

/// What a domain does (libvirt-domain.h, `virDomainState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// It stands still; libvirt's number for why.
    Paused(i32),
    /// It has no process.
    ShutOff,
    /// Another: it crashes, shuts down or sleeps.
    Other(i32),
}

/// An event of a domain's QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its name, for example `STOP`.
    pub name: String,
    /// When QEMU emitted it, by the wall clock of its host.
    pub emitted: Duration,
    /// Its data as JSON, or nothing.
    pub details: Option<String>,
}

/// A domain of a connection, which stays open as long as this lives.
#[derive(Debug)]
pub struct Domain {
    connection: Connection,
    pointer: DomainPtr,
}

// SAFETY: a virDomainPtr is an object with a lock of its own, and any thread may use it.
unsafe impl Send for Domain {}
// SAFETY: the same.
unsafe impl Sync for Domain {}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: the reference that libvirt handed out, which is given back once.
        unsafe { (self.library().virDomainFree)(self.pointer) };
    }
}

impl Connection {
    /// The domain called `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn domain(&self, name: &str) -> Result<Domain, LibvirtError> {
        let text = c_text(name)?;
        let library = self.inner.library;
        // SAFETY: the connection is open, and the text lives as long as the call.
        let pointer = unsafe { (library.virDomainLookupByName)(self.inner.pointer, text.as_ptr()) };
        Domain::of(self, pointer).ok_or_else(|| library.refused("find the domain"))
    }

    /// The domain with this UUID.
    ///
    /// # Errors
    /// When there is none.
    pub fn domain_by_uuid(&self, uuid: &str) -> Result<Domain, LibvirtError> {
        let text = c_text(uuid)?;
        let library = self.inner.library;
        // SAFETY: the connection is open, and the text lives as long as the call.
        let pointer =
            unsafe { (library.virDomainLookupByUUIDString)(self.inner.pointer, text.as_ptr()) };
        Domain::of(self, pointer).ok_or_else(|| library.refused("find the domain"))
    }

    /// All domains, those that are shut off among them.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn domains(&self) -> Result<Vec<Domain>, LibvirtError> {
        let library = self.inner.library;
        let mut list = std::ptr::null_mut();
        // SAFETY: the connection is open, and the pointer is this function's own.
        let count = unsafe {
            (library.virConnectListAllDomains)(self.inner.pointer, &raw mut list, ALL_DOMAINS)
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(library.refused("list its domains"));
        };
        // SAFETY: libvirt has made a list of so many domains, each of which is the caller's.
        let domains = (0..count).filter_map(|at| Domain::of(self, unsafe { *list.add(at) }));
        let domains = domains.collect();
        // SAFETY: the list itself is the caller's as well, and its domains were taken out.
        unsafe { libc::free(list.cast()) };
        Ok(domains)
    }

    /// Makes a domain persistent with this definition.
    ///
    /// # Errors
    /// When the definition does not fit this host.
    pub fn define(&self, xml: &str) -> Result<Domain, LibvirtError> {
        let xml = c_text(xml)?;
        let library = self.inner.library;
        // SAFETY: the connection is open, and the text lives as long as the call.
        let pointer =
            unsafe { (library.virDomainDefineXMLFlags)(self.inner.pointer, xml.as_ptr(), 0) };
        Domain::of(self, pointer).ok_or_else(|| library.refused("define the domain"))
    }
}

impl Domain {
    /// What libvirt handed out, if it did.
    fn of(connection: &Connection, pointer: DomainPtr) -> Option<Self> {
        (!pointer.is_null()).then(|| Self { connection: connection.clone(), pointer })
    }

    fn library(&self) -> &'static Library {
        self.connection.inner.library
    }

    /// What libvirt said, if a number below 0 says that it refused.
    fn done(&self, code: c_int, action: &'static str) -> Result<c_int, LibvirtError> {
        if code < 0 { Err(self.library().refused(action)) } else { Ok(code) }
    }

    /// The connection that it was found by.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The same domain, by [`Connection::standing`].
    ///
    /// # Errors
    /// When it is gone, or its daemon is.
    pub fn standing(&self) -> Result<Self, LibvirtError> {
        self.connection.standing()?.domain_by_uuid(&self.uuid()?)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the text is the domain's own and is copied.
        unsafe { c_text_of((self.library().virDomainGetName)(self.pointer)) }.unwrap_or_default()
    }

    /// Its UUID.
    ///
    /// # Errors
    /// When libvirt does not tell.
    pub fn uuid(&self) -> Result<String, LibvirtError> {
        let mut buffer: [c_char; UUID_LENGTH] = [0; UUID_LENGTH];
        let get = self.library().virDomainGetUUIDString;
        // SAFETY: the buffer has room for a UUID and its NUL.
        self.done(unsafe { get(self.pointer, buffer.as_mut_ptr()) }, "tell a UUID")?;
        // SAFETY: libvirt has written a text with a NUL at its end.
        Ok(unsafe { c_text_of(buffer.as_ptr()) }.unwrap_or_default())
    }

    /// A description of it.
    ///
    /// # Errors
    /// When it is gone, or the connection may only read.
    pub fn xml(&self, which: Xml) -> Result<String, LibvirtError> {
        // SAFETY: the text is the caller's to free.
        let xml =
            unsafe { own_text((self.library().virDomainGetXMLDesc)(self.pointer, which.flags())) };
        xml.ok_or_else(|| self.library().refused("describe the domain"))
    }

    /// What it does.
    ///
    /// # Errors
    /// When it is gone.
    pub fn state(&self) -> Result<State, LibvirtError> {
        let (mut state, mut reason) = (0, 0);
        let get = self.library().virDomainGetState;
        // SAFETY: both numbers are this function's own.
        let code = unsafe { get(self.pointer, &raw mut state, &raw mut reason, 0) };
        self.done(code, "tell the domain's state")?;
        Ok(match state {
            1 => State::Running,
            3 => State::Paused(reason),
            5 => State::ShutOff,
            other => State::Other(other),
        })
    }

    /// Whether it has a job: a migration, a save, a backup, …
    ///
    /// # Errors
    /// When it does not run.
    pub fn has_job(&self) -> Result<bool, LibvirtError> {
        let mut job = JobInfo::default();
        let get = self.library().virDomainGetJobInfo;
        // SAFETY: the structure is this function's own, and as long as libvirt's.
        self.done(unsafe { get(self.pointer, &raw mut job) }, "tell the domain's jobs")?;
        Ok(job.kind != 0)
    }

    /// How many bytes of its disk `target` (`vda`) are in use.
    ///
    /// # Errors
    /// When it has no such disk, or nobody can tell.
    pub fn disk_in_use(&self, target: &str) -> Result<u64, LibvirtError> {
        let target = c_text(target)?;
        let mut info = BlockInfo::default();
        let get = self.library().virDomainGetBlockInfo;
        // SAFETY: the text lives as long as the call; the structure is this function's own, and as
        // long as libvirt's.
        let code = unsafe { get(self.pointer, target.as_ptr(), &raw mut info, 0) };
        self.done(code, "tell the size of a disk")?;
        // A device of a host's may say nothing of what is in use.
        Ok(if info.allocation == 0 { info.capacity } else { info.allocation })
    }

    /// Whether it stays defined when it does not run.
    ///
    /// # Errors
    /// When it is gone.
    pub fn is_persistent(&self) -> Result<bool, LibvirtError> {
        let is = self.library().virDomainIsPersistent;
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { is(self.pointer) }, "tell whether the domain is persistent")
            .map(|answer| answer == 1)
    }

    /// Whether it is started with its host.
    ///
    /// # Errors
    /// When it is gone.
    pub fn autostarts(&self) -> Result<bool, LibvirtError> {
        let mut autostarts = 0;
        let get = self.library().virDomainGetAutostart;
        // SAFETY: the number is this function's own.
        let code = unsafe { get(self.pointer, &raw mut autostarts) };
        self.done(code, "tell whether the domain is started with its host")?;
        Ok(autostarts == 1)
    }

    /// Has it started with its host, or not.
    ///
    /// # Errors
    /// When it is not persistent.
    pub fn set_autostart(&self, on: bool) -> Result<(), LibvirtError> {
        let set = self.library().virDomainSetAutostart;
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { set(self.pointer, c_int::from(on)) }, "have the domain autostart")
            .map(drop)
    }

    /// Whether a managed save image of it is kept, from which it would be started.
    ///
    /// # Errors
    /// When it is gone.
    pub fn has_managed_save(&self) -> Result<bool, LibvirtError> {
        let has = self.library().virDomainHasManagedSaveImage;
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { has(self.pointer, 0) }, "tell of managed save images")
            .map(|answer| answer == 1)
    }

    /// How many snapshots of it libvirt knows.
    ///
    /// # Errors
    /// When it is gone.
    pub fn snapshots(&self) -> Result<usize, LibvirtError> {
        let count = self.library().virDomainSnapshotNum;
        // SAFETY: the domain is there as long as this is.
        let count = self.done(unsafe { count(self.pointer, 0) }, "count the snapshots")?;
        Ok(count.unsigned_abs() as usize)
    }

    /// How many checkpoints of it libvirt knows.
    ///
    /// # Errors
    /// When it is gone.
    pub fn checkpoints(&self) -> Result<usize, LibvirtError> {
        let list = self.library().virDomainListAllCheckpoints;
        // SAFETY: without a place for a list libvirt only counts.
        let count = self.done(unsafe { list(self.pointer, null_mut(), 0) }, "count checkpoints")?;
        Ok(count.unsigned_abs() as usize)
    }

    /// Stops its vCPUs.
    ///
    /// # Errors
    /// When it does not run, or has a job.
    pub fn suspend(&self) -> Result<(), LibvirtError> {
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { (self.library().virDomainSuspend)(self.pointer) }, "suspend the domain")
            .map(drop)
    }

    /// Runs its vCPUs.
    ///
    /// # Errors
    /// When it is not paused, or has a job.
    pub fn resume(&self) -> Result<(), LibvirtError> {
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { (self.library().virDomainResume)(self.pointer) }, "resume the domain")
            .map(drop)
    }

    /// Ends its process, at once.
    ///
    /// # Errors
    /// When it has none.
    pub fn destroy(&self) -> Result<(), LibvirtError> {
        let destroy = self.library().virDomainDestroyFlags;
        // SAFETY: the domain is there as long as this is.
        self.done(unsafe { destroy(self.pointer, 0) }, "destroy the domain").map(drop)
    }

    /// Forgets its definition. The variables of its firmware, which libvirt will not leave behind
    /// unasked, stay (`KEEP_NVRAM`): whoever has the domain now has them, too.
    ///
    /// # Errors
    /// When it is not persistent, or has snapshots.
    pub fn undefine(&self) -> Result<(), LibvirtError> {
        const KEEP_NVRAM: c_uint = 8;
        let undefine = self.library().virDomainUndefineFlags;
        // SAFETY: the domain is there as long as this is.
        if unsafe { undefine(self.pointer, 0) } == 0 {
            return Ok(());
        }
        let refused = self.library().refused("undefine the domain");
        // SAFETY: the same.
        if unsafe { undefine(self.pointer, KEEP_NVRAM) } == 0 { Ok(()) } else { Err(refused) }
    }

    /// Reads guest memory at the physical address `at`, by way of QEMU.
    ///
    /// # Errors
    /// When there is none.
    pub fn peek(&self, at: u64, buffer: &mut [u8]) -> Result<(), LibvirtError> {
        let peek = self.library().virDomainMemoryPeek;
        let (to, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: libvirt writes `length` bytes at most, which is what the buffer has.
        let code = unsafe { peek(self.pointer, at, length, to, PHYSICAL) };
        self.done(code, "read the guest's memory").map(drop)
    }

    /// Has its QEMU carry out a command, with a descriptor beside it if there is one, and returns
    /// QEMU's answer as it came, which may be a refusal.
    ///
    /// # Errors
    /// When it could not be asked.
    pub fn monitor(
        &self,
        command: &str,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<String, LibvirtError> {
        const ACTION: &str = "hand a command to QEMU";
        let command = c_text(command)?;
        let library = self.library();
        let mut answer = null_mut();
        let code = match descriptor {
            // SAFETY: the text lives as long as the call, and the pointer is this function's own.
            None => unsafe {
                let run = library.virDomainQemuMonitorCommand;
                run(self.pointer, command.as_ptr(), &raw mut answer, 0)
            },
            Some(descriptor) => {
                let mut files = [descriptor.as_raw_fd()];
                // SAFETY: the same; there is one descriptor, which is open as long as the call, and
                // none is asked for.
                unsafe {
                    (library.virDomainQemuMonitorCommandWithFiles)(
                        self.pointer,
                        command.as_ptr(),
                        1,
                        files.as_mut_ptr(),
                        null_mut(),
                        null_mut(),
                        &raw mut answer,
                        0,
                    )
                }
            }
        };
        self.done(code, ACTION)?;
        // SAFETY: the text is the caller's to free.
        unsafe { own_text(answer) }.ok_or_else(|| LibvirtError::Refused {
            action: ACTION,
            kind: ErrorKind::Other,
            words: "it gave no answer".to_owned(),
        })
    }

    /// Has `to` hear of the events of its QEMU from here on, as long as the answer lives.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub fn tell_events(&self, to: Sender<Event>) -> Result<Subscription, LibvirtError> {
        let own = Box::into_raw(Box::new(to));
        let register = self.library().virConnectDomainQemuMonitorEventRegister;
        let pointer = self.connection.inner.pointer;
        // SAFETY: `hear` takes what libvirt gives it by its type, and `own`, which is freed by
        // `forget` alone, once libvirt calls it no more.
        let number =
            unsafe { register(pointer, self.pointer, null(), hear, own.cast(), Some(forget), 0) };
        if number < 0 {
            let refused = self.library().refused("tell of QEMU's events");
            // SAFETY: libvirt has not kept it.
            drop(unsafe { Box::from_raw(own) });
            return Err(refused);
        }
        Ok(Subscription { inner: Arc::clone(&self.connection.inner), number })
    }
}

/// Events of a domain's QEMU are told as long as this lives.
#[derive(Debug)]
pub struct Subscription {
    inner: Arc<Inner>,
    number: c_int,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let deregister = self.inner.library.virConnectDomainQemuMonitorEventDeregister;
        // SAFETY: the number is that of a callback of this connection's. Libvirt frees what is the
        // callback's own when none of its threads is within it.
        unsafe { deregister(self.inner.pointer, self.number) };
    }
}

/// Passes an event on.
unsafe extern "C" fn hear(
    _connection: ConnectPtr,
    _domain: DomainPtr,
    name: *const c_char,
    seconds: i64,
    micros: c_uint,
    details: *const c_char,
    own: *mut c_void,
) {
    let seconds = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let emitted = seconds + Duration::from_micros(u64::from(micros));
    // SAFETY: both are texts that live as long as this call, or null.
    let (name, details) = unsafe { (c_text_of(name), c_text_of(details)) };
    let event = Event { name: name.unwrap_or_default(), emitted, details };
    // SAFETY: `own` is what tell_events() gave libvirt for this callback, and not freed yet.
    let to = unsafe { &*own.cast::<Sender<Event>>() };
    // Nobody may listen any more.
    let _ = to.send(event);
}

/// Frees what was `hear`'s own.
unsafe extern "C" fn forget(own: *mut c_void) {
    // SAFETY: tell_events() has made it, and libvirt calls this once.
    drop(unsafe { Box::from_raw(own.cast::<Sender<Event>>()) });
}
