//! libvirt.so.0 and libvirt-qemu.so.0, and the functions of them that are used.
//!
//! Invariant: a function is called by the type that libvirt's headers (libvirt-host.h,
//! libvirt-domain.h, libvirt-event.h, libvirt-qemu.h, virterror.h) give it; the libraries are
//! loaded once and never unloaded. Every function here is older than 8.2, so a host that has not
//! got them all is told so by one line.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::OnceLock;

use crate::error::{ErrorKind, LibvirtError};

/// A connection, as libvirt hands it out.
pub(crate) type ConnectPtr = *mut c_void;
/// A domain, as libvirt hands it out.
pub(crate) type DomainPtr = *mut c_void;
/// Hears of a QEMU's events: connection, domain, name, seconds, microseconds, details, its own.
pub(crate) type EventCallback = unsafe extern "C" fn(
    ConnectPtr,
    DomainPtr,
    *const c_char,
    i64,
    c_uint,
    *const c_char,
    *mut c_void,
);
/// Gives back what a callback was given as its own.
pub(crate) type FreeCallback = unsafe extern "C" fn(*mut c_void);
type ErrorCallback = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// Says which functions are looked up, where, and what each is.
macro_rules! functions {
    ($($library:ident { $($name:ident: fn($($argument:ty),*) -> $answer:ty;)* })*) => {
        /// The functions.
        #[allow(non_snake_case, reason = "they are called as libvirt calls them")]
        pub(crate) struct Library {
            $($(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $answer,)*)*
        }

        impl Library {
            fn load() -> Result<Self, LibvirtError> {
                $(let $library = open(Name::$library)?;)*
                Ok(Self {
                    // SAFETY: the symbol is a function of that type, by libvirt's headers.
                    $($($name: unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) -> $answer,
                        >(symbol($library, stringify!($name))?)
                    },)*)*
                })
            }
        }
    };
}

functions! {
    base {
        virInitialize: fn() -> c_int;
        virSetErrorFunc: fn(*mut c_void, Option<ErrorCallback>) -> ();
        virGetLastErrorCode: fn() -> c_int;
        virGetLastErrorMessage: fn() -> *const c_char;
        virEventRegisterDefaultImpl: fn() -> c_int;
        virEventRunDefaultImpl: fn() -> c_int;
        virConnectOpen: fn(*const c_char) -> ConnectPtr;
        virConnectClose: fn(ConnectPtr) -> c_int;
        virConnectIsAlive: fn(ConnectPtr) -> c_int;
        virConnectSetKeepAlive: fn(ConnectPtr, c_int, c_uint) -> c_int;
        virConnectGetURI: fn(ConnectPtr) -> *mut c_char;
        virConnectGetLibVersion: fn(ConnectPtr, *mut c_ulong) -> c_int;
        virConnectGetVersion: fn(ConnectPtr, *mut c_ulong) -> c_int;
        virConnectListAllDomains: fn(ConnectPtr, *mut *mut DomainPtr, c_uint) -> c_int;
        virDomainLookupByName: fn(ConnectPtr, *const c_char) -> DomainPtr;
        virDomainLookupByUUIDString: fn(ConnectPtr, *const c_char) -> DomainPtr;
        virDomainDefineXMLFlags: fn(ConnectPtr, *const c_char, c_uint) -> DomainPtr;
        virDomainRestoreFlags: fn(ConnectPtr, *const c_char, *const c_char, c_uint) -> c_int;
        virDomainFree: fn(DomainPtr) -> c_int;
        virDomainGetName: fn(DomainPtr) -> *const c_char;
        virDomainGetUUIDString: fn(DomainPtr, *mut c_char) -> c_int;
        virDomainGetXMLDesc: fn(DomainPtr, c_uint) -> *mut c_char;
        virDomainGetState: fn(DomainPtr, *mut c_int, *mut c_int, c_uint) -> c_int;
        virDomainGetJobInfo: fn(DomainPtr, *mut JobInfo) -> c_int;
        virDomainGetBlockInfo: fn(DomainPtr, *const c_char, *mut BlockInfo, c_uint) -> c_int;
        virDomainIsPersistent: fn(DomainPtr) -> c_int;
        virDomainGetAutostart: fn(DomainPtr, *mut c_int) -> c_int;
        virDomainSetAutostart: fn(DomainPtr, c_int) -> c_int;
        virDomainHasManagedSaveImage: fn(DomainPtr, c_uint) -> c_int;
        virDomainSnapshotNum: fn(DomainPtr, c_uint) -> c_int;
        virDomainListAllCheckpoints: fn(DomainPtr, *mut *mut *mut c_void, c_uint) -> c_int;
        virDomainSuspend: fn(DomainPtr) -> c_int;
        virDomainResume: fn(DomainPtr) -> c_int;
        virDomainDestroyFlags: fn(DomainPtr, c_uint) -> c_int;
        virDomainUndefineFlags: fn(DomainPtr, c_uint) -> c_int;
        virDomainMemoryPeek: fn(DomainPtr, u64, usize, *mut c_void, c_uint) -> c_int;
    }
    qemu {
        virDomainQemuMonitorCommand:
            fn(DomainPtr, *const c_char, *mut *mut c_char, c_uint) -> c_int;
        virDomainQemuMonitorCommandWithFiles: fn(
            DomainPtr,
            *const c_char,
            c_uint,
            *mut c_int,
            *mut c_uint,
            *mut *mut c_int,
            *mut *mut c_char,
            c_uint
        ) -> c_int;
        virConnectDomainQemuMonitorEventRegister: fn(
            ConnectPtr,
            DomainPtr,
            *const c_char,
            EventCallback,
            *mut c_void,
            Option<FreeCallback>,
            c_uint
        ) -> c_int;
        virConnectDomainQemuMonitorEventDeregister: fn(ConnectPtr, c_int) -> c_int;
    }
}

/// What a domain is busy with (libvirt-domain.h, `virDomainJobInfo`).
#[repr(C)]
#[derive(Default)]
pub(crate) struct JobInfo {
    /// 0: nothing.
    pub(crate) kind: c_int,
    rest: [u64; 11],
}

/// How large a disk is (libvirt-domain.h, `virDomainBlockInfo`).
#[repr(C)]
#[derive(Default)]
pub(crate) struct BlockInfo {
    pub(crate) capacity: u64,
    pub(crate) allocation: u64,
    physical: u64,
}

#[allow(non_camel_case_types, reason = "the macro names them so")]
#[derive(Clone, Copy)]
enum Name {
    base,
    qemu,
}

impl Name {
    fn file(self) -> &'static CStr {
        match self {
            Self::base => c"libvirt.so.0",
            Self::qemu => c"libvirt-qemu.so.0",
        }
    }
}

fn open(name: Name) -> Result<*mut c_void, LibvirtError> {
    // SAFETY: the name ends with a NUL; the library's own initialisers are run, as they are for
    // every program that is linked to it.
    let library = unsafe { libc::dlopen(name.file().as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: dlerror(3) returns a text of this thread's, or nothing.
    let why = unsafe { text(libc::dlerror()) };
    Err(LibvirtError::NoLibrary { why: why.unwrap_or_default() })
}

fn symbol(library: *mut c_void, function: &'static str) -> Result<*mut c_void, LibvirtError> {
    let Ok(name) = CString::new(function) else {
        return Err(LibvirtError::OldLibrary { function });
    };
    // SAFETY: `library` was opened and is never closed; the name ends with a NUL.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    if symbol.is_null() { Err(LibvirtError::OldLibrary { function }) } else { Ok(symbol) }
}

/// A C text, if there is one.
///
/// # Safety
/// It must be null or end with a NUL, and live as long as the call.
pub(crate) unsafe fn text(at: *const c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: as the caller promises.
    Some(unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}

/// A C text that belongs to the caller, which is freed.
///
/// # Safety
/// It must be null, or a text of libvirt's that is the caller's to free(3), and is not used again.
pub(crate) unsafe fn own_text(at: *mut c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    let copy = unsafe { text(at) };
    // SAFETY: libvirt's texts are made by malloc(3); free(3) of null does nothing.
    unsafe { libc::free(at.cast()) };
    copy
}

/// `text` as C has it.
pub(crate) fn c_text(text: &str) -> Result<CString, LibvirtError> {
    CString::new(text).map_err(|_| LibvirtError::Nul { text: text.replace('\0', "") })
}

/// Otherwise the library writes each error to standard error, in words that are told anyway.
unsafe extern "C" fn say_nothing(_own: *mut c_void, _error: *mut c_void) {}

/// The library, loaded at the first call, with its event loop in a thread of its own: connections
/// that are made after that have keepalive and events.
pub(crate) fn library() -> Result<&'static Library, LibvirtError> {
    static LIBRARY: OnceLock<Result<Library, LibvirtError>> = OnceLock::new();
    LIBRARY.get_or_init(start).as_ref().map_err(Clone::clone)
}

fn start() -> Result<Library, LibvirtError> {
    let library = Library::load()?;
    let failed = |why: &str| LibvirtError::NoLibrary { why: why.to_owned() };
    // SAFETY: these are called once, before all else, by this thread; the callback takes what it
    // is given and looks at nothing of it.
    let began = unsafe {
        (library.virInitialize)() == 0 && {
            (library.virSetErrorFunc)(std::ptr::null_mut(), Some(say_nothing));
            (library.virEventRegisterDefaultImpl)() == 0
        }
    };
    if !began {
        return Err(failed("it does not initialise"));
    }
    let turn = library.virEventRunDefaultImpl;
    let run = move || loop {
        // SAFETY: one thread alone runs the loop, for as long as the process lives, in which the
        // library stays loaded.
        if unsafe { turn() } < 0 {
            // A turn fails where there is nothing to wait for.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    };
    let thread = std::thread::Builder::new().name("libvirt-events".to_owned()).spawn(run);
    thread.map_err(|error| failed(&format!("no thread for its events: {error}")))?;
    Ok(library)
}

impl Library {
    /// What the last call of this thread failed with: its kind, and libvirt's words on one line.
    pub(crate) fn last_error(&self) -> (ErrorKind, String) {
        // SAFETY: both look at what this thread's last call has left; the text is copied at once.
        let (code, words) =
            unsafe { ((self.virGetLastErrorCode)(), text((self.virGetLastErrorMessage)())) };
        let words = words.unwrap_or_default();
        let lines: Vec<&str> =
            words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        (ErrorKind::of(code), lines.join("; "))
    }

    /// The same as an error of `action`.
    pub(crate) fn refused(&self, action: &'static str) -> LibvirtError {
        let (kind, words) = self.last_error();
        LibvirtError::Refused { action, kind, words }
    }
}
