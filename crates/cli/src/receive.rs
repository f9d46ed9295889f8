//! `godwit receive`.

mod recording;
mod tell;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_confine::Rights;
use godwit_control::client;
use godwit_control::messages::{Cost, ReceiveRequest};
use godwit_disk::DiskChoice;
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{Left, Notice, Options, Received, follow, receive};
use godwit_engine::security::Security;
use godwit_engine::vm::DestinationVm;
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor};
use godwit_memory::RamBlock;
use godwit_qemu::{
    LeftDestination, LibvirtDestination, Mapping, QemuDestination, QemuError, Shown, StartTerms,
    StartedDestination, Starting,
};
use godwit_units::{ByteCount, GRAMMAR, parse_duration};
use serde_json::{Value, json};

use crate::layout;
use crate::output::{self, json_line};
use crate::process::{self, FAILED};
use crate::processors::ProcessorArguments;
use crate::records::on_off;
use crate::rights;
use crate::say;
use crate::security::SecurityArguments;
use crate::vm::{RequestError, VmName, absolute, libvirt_uri, refused_qemu};

use self::recording::record;
use self::tell::{last_line, tell, tell_notice};

/// With less RAM than this nobody cares what it costs to fill.
const WORTH_ADVICE: ByteCount = ByteCount(1 << 30);

/// Take a guest into a VM on this host that waits for one.
///
/// The VM is started with the source's options and `-incoming defer` (a microvm: `--incoming`). One
/// guest is taken in, then the command ends. Connections that do not speak the protocol are refused
/// and told of. What comes from beyond this host is encrypted, or needs --insecure.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    /// The VM: qemu:PATH, where PATH is the unix socket of a QMP monitor that nobody else is
    /// connected to; pid:N, a QEMU by its process, which has such a monitor; libvirt: or
    /// libvirt:@URI, a libvirt that starts the domain which the source tells it; or microvm:PATH,
    /// where PATH is the machine's control socket
    #[arg(long, value_name = "VM", required_unless_present = "start")]
    vm: Option<VmName>,

    /// Instead, start a QEMU from what the source tells of its own: its command line, with a
    /// monitor of godwit's and the paths that --map names. It is shown before it starts, ends if
    /// the guest does not come to run in it, and stands on its own if it does
    #[arg(long, conflicts_with = "vm")]
    start: bool,

    /// With --start: a directory or file of the source's that may be used here, and where it is;
    /// more than once for several. Paths that nobody names are not opened
    #[arg(long, value_name = "/OLD=/NEW|/SAME", requires = "start")]
    map: Vec<Mapping>,

    /// With --start: a program that QEMU may run for a network card (script=, downscript=,
    /// helper=); more than once for several
    #[arg(long, value_name = "PROGRAM", requires = "start")]
    script: Vec<PathBuf>,

    /// With --start: the QEMU to start [default: the one on PATH that is called as the source's]
    #[arg(long, value_name = "PROGRAM", requires = "start")]
    emulator: Option<PathBuf>,

    /// With --start: show what would be started, and refuse the source
    #[arg(long, requires = "start")]
    dry_run: bool,

    /// Where to listen: HOST:PORT (port 0: any), [IPV6]:PORT, unix:PATH or vsock:any:PORT
    #[arg(long, value_name = "ADDR")]
    listen: Address,

    #[command(flatten)]
    security: SecurityArguments,

    #[command(flatten)]
    processors: ProcessorArguments,

    /// How long to wait for a source; 0s: forever
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    wait: Duration,

    /// How long what has arrived is kept for a source whose connections are lost before its guest
    /// is stopped; 0s: not at all
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    reconnect: Duration,

    /// Where to write down (a file of this user's alone, removed at the end) what another `godwit
    /// receive` of the same VM needs to go on, should this one be killed before the guest is
    /// stopped: type the same command again, with the same port, within the source's --reconnect.
    /// For a QEMU that waits
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,

    /// Codecs that are taken: auto for all of them, none, lz4 or zstd
    #[arg(long, value_name = "CODEC", default_value = "auto")]
    compression: Compression,

    /// Disks of this VM that the source may overwrite: all, none, or names with commas between.
    /// Without it nobody who reaches the port can write to a disk
    #[arg(long, value_name = "all|none|NAME,...", default_value = "none")]
    disks: DiskChoice,

    /// Where a disk of a domain of libvirt's that moves along is to be, if not where the source has
    /// it: for each one --disk, as in --disk vda=/vm/web01.qcow2
    #[arg(long = "disk", value_name = "NAME=PATH", value_parser = disk_path)]
    disk_paths: Vec<(String, PathBuf)>,

    /// How many times the network is told where the guest's cards are when it runs here, ever more
    /// slowly; 0: not at all. Of QEMUs that wait or are started [default: QEMU's own setting, and 5
    /// times more]
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u16).range(..=1000))]
    announce: Option<u16>,

    /// Take the guest in even if it may come to use more memory than this host, or the control
    /// group of the VM, has left; then the kernel may end the VM when memory runs out
    #[arg(long)]
    overcommit: bool,

    /// For hunting a bug: write all of the guest's memory into files of this directory, once when
    /// it has all arrived and once more when device state is loaded, and say which pages differ.
    /// The guest stands still meanwhile. Files are this user's alone, as is a directory that is
    /// made for them
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,

    /// The directory to which the source copies what is missing when the guest leaves before all of
    /// its memory (`godwit migrate --postcopy-safe`), on storage that both hosts have. What the
    /// source did not send before it was lost is taken from there
    #[arg(long, value_name = "DIR")]
    postcopy_safe: Option<PathBuf>,

    /// Keep a record of it, which `godwit report` shows beside those of `godwit migrate`: in
    /// $XDG_STATE_HOME/godwit/records, or ~/.local/state/godwit/records; of root
    /// /var/lib/godwit/records
    #[arg(long = "record", value_name = "on|off", default_value = "on")]
    #[arg(action = clap::ArgAction::Set, value_parser = on_off)]
    keeps_record: bool,

    /// Do not confine the threads that read what comes from outside, which else have no capability
    /// and only the system calls of their work: for a host where that is in the way
    #[arg(long)]
    unconfined: bool,

    #[cfg(feature = "test-hooks")]
    #[command(flatten)]
    hooks: crate::hooks::Receive,

    /// Print events and result as lines of JSON on standard output
    #[arg(long)]
    json: bool,
}

/// What a destination needs of what root may do, for a VM of another user; docs/security.md.
const RIGHTS: Rights = Rights::TRACE
    .and(Rights::MAPPED)
    .and(Rights::FILES)
    .and(Rights::KILL)
    .and(Rights::RESOURCE)
    .and(Rights::PACKETS)
    .and(Rights::PORTS);

/// Where a disk is to be.
fn disk_path(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => {
            Ok((name.to_owned(), path.into()))
        }
        _ => Err("use NAME=PATH, with a path that begins with /".to_owned()),
    }
}

/// Gives up what of root's rights a destination has no use for, before any thread is started; its
/// guardian has no more. A QEMU that is started has to have what it would have by hand.
fn give_up_rights(arguments: &Arguments) -> io::Result<()> {
    arguments.vm.as_ref().map_or(Ok(()), |_| rights::keep_only(RIGHTS))
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    if let Err(error) = give_up_rights(arguments) {
        output::refusal(&error, arguments.json);
        return ExitCode::from(FAILED);
    }
    if let Err(error) = arguments.processors.apply(arguments.vm.as_ref()) {
        output::refusal(&error, arguments.json);
        return ExitCode::from(FAILED);
    }
    #[cfg(feature = "test-hooks")]
    if let Err(error) = arguments.hooks.placed.open() {
        output::refusal(&error, arguments.json);
        return ExitCode::from(FAILED);
    }
    let cancel = process::cancel_on_signals();
    let json = arguments.json;
    let mut again = None;
    let mut recording = None;
    let mut notice = |notice: &Notice| {
        tell_notice(notice, !arguments.disks.is_none(), json);
        if arguments.keeps_record {
            record(&mut recording, notice, arguments.vm.as_ref(), &arguments.listen);
        }
    };
    let result = take_in(arguments, &cancel, &mut notice, &mut again);
    let last = match &result {
        Ok((received, cost)) => last_line(received, *cost),
        Err(RequestError::Failed(failure)) => failed_line(failure, again),
        Err(RequestError::Refused(error)) => {
            json!({ "outcome": "refused", "error": error.to_string() })
        }
    };
    let code = match result {
        Ok((received, cost)) => {
            if json {
                json_line(&last);
            } else {
                tell(&received, cost);
            }
            ExitCode::SUCCESS
        }
        Err(RequestError::Refused(error)) => {
            output::refusal(&*error, json);
            ExitCode::from(FAILED)
        }
        // It has done what it was for.
        Err(RequestError::Failed(_)) if matches!(again, Some(Again::Shown)) => {
            if json {
                json_line(&json!({ "outcome": "shown" }));
            }
            ExitCode::SUCCESS
        }
        Err(RequestError::Failed(failure)) => {
            tell_failure(&failure, again, json.then_some(&last));
            process::exit_code(&failure)
        }
    };
    // Storage that hangs keeps back no outcome.
    if let Some(recording) = recording {
        recording.end(&last);
    }
    code
}

/// The engine is in this process for a QEMU, and in the VMM's for a microvm.
fn take_in(
    arguments: &Arguments,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
    again: &mut Option<Again>,
) -> Result<(Received, Cost), RequestError> {
    let wait = Some(arguments.wait).filter(|wait| !wait.is_zero());
    // Of a microvm, its VMM looks.
    if !matches!(arguments.vm, Some(VmName::Microvm(_))) {
        security(arguments)?;
    }
    match &arguments.vm {
        None | Some(VmName::Qemu(_) | VmName::Proxmox(_) | VmName::Microvm(_))
            if !arguments.disk_paths.is_empty() =>
        {
            let words = "--disk is for domains of libvirt's (--vm libvirt:): other machines have \
                         their images before they start";
            Err(RequestError::Refused(words.into()))
        }
        None | Some(VmName::Libvirt { .. } | VmName::Microvm(_))
            if arguments.state_dir.is_some() =>
        {
            let words = "--state-dir is for a QEMU that waits (--vm qemu: or pid:): one that is \
                         started for the guest ends with this command";
            Err(RequestError::Refused(words.into()))
        }
        Some(VmName::Libvirt { .. } | VmName::Microvm(_)) if arguments.announce.is_some() => {
            let words = "--announce is for a QEMU that waits or is started: libvirt \
                         has its own way, and a microvm has no network card";
            Err(RequestError::Refused(words.into()))
        }
        None => take_into_started(arguments, cancel, notice, again),
        Some(VmName::Qemu(path)) => {
            if let Some(fetched) = fetch_left(path, arguments, cancel, notice)? {
                return Ok(fetched);
            }
            let vm = QemuDestination::open(path)
                .and_then(|mut vm| vm.check_disks(&arguments.disks).map(|()| vm));
            let vm = vm.map(|vm| vm.announcing(arguments.announce));
            let vm = vm.and_then(|vm| vm.guarded(Path::new(process::THIS_PROGRAM)));
            let mut vm = vm.map_err(|error| RequestError::Refused(refused_qemu(path, error)))?;
            let record = arguments.state_dir.as_ref().map(|dir| vm.record_in(dir));
            take_into(&mut vm, (arguments, record), cancel, notice, again, |vm| {
                if vm.still_waits() { Again::Waits } else { Again::QemuEnded }
            })
        }
        Some(VmName::Proxmox(id)) => {
            let words = format!(
                "Proxmox starts no VM that waits in a way that godwit can use: write --start, with \
                 --map for what VM {id} has (docs/proxmox.md)"
            );
            Err(RequestError::Refused(words.into()))
        }
        Some(VmName::Libvirt { domain, .. }) if !domain.is_empty() => {
            let words = format!(
                "the domain's name comes from the source: write libvirt: or libvirt:@URI, without \
                 '{domain}'"
            );
            Err(RequestError::Refused(words.into()))
        }
        Some(VmName::Libvirt { uri, .. }) => {
            let uri = libvirt_uri(uri.as_deref());
            let program = Path::new(process::THIS_PROGRAM);
            let vm = LibvirtDestination::open(&uri, program, |what| {
                eprintln!("godwit: {}", say::line(what));
            });
            let vm = vm.map_err(|error| RequestError::Refused(error.into()))?;
            let mut vm = vm.with_disks(&arguments.disks, arguments.disk_paths.clone());
            take_into(&mut vm, (arguments, None), cancel, notice, again, |_| Again::LibvirtWaits)
        }
        Some(VmName::Microvm(path)) => {
            let request = ReceiveRequest {
                listen: arguments.listen.to_string(),
                wait_ms: wait.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
                codecs: Some(arguments.compression.to_string()),
                disks: arguments.disks.to_string(),
                overcommit: arguments.overcommit,
                security: arguments.security.wish(),
                reconnect_ms: u64::try_from(arguments.reconnect.as_millis()).unwrap_or(u64::MAX),
                dump: dump_directory(arguments)?,
                postcopy_safe: safe_directory(arguments)?,
                unconfined: arguments.unconfined,
            };
            let mut listening = |address: &str| {
                tell_listening(&Listening { address, advice: None, confined: None }, arguments);
            };
            let received = client::receive(path, request, cancel, &mut listening, notice);
            Ok(received.inspect_err(|_| {
                let waits = client::status(path).is_ok_and(|status| status.state == "incoming");
                *again = Some(if waits { Again::Waits } else { Again::MicrovmUsedUp });
            })?)
        }
    }
}

/// Where the guest of the QEMU at `path` runs already and a godwit that was killed has left pages
/// of it missing: fetches these.
fn fetch_left(
    path: &Path,
    arguments: &Arguments,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Option<(Received, Cost)>, RequestError> {
    let refused = |error: QemuError| RequestError::Refused(refused_qemu(path, error));
    let Some(record) = LeftDestination::record_of(path).map_err(refused)? else {
        return Ok(None);
    };
    // What can fail comes first: what was left goes with who has it.
    let options = options(arguments, None)?;
    let (listener, address) = bind(arguments)?;
    let left = Left::find(&record, &options.security);
    let left = left.map_err(|error| RequestError::Refused(error.into()))?;
    let Some(left) = left else { return Ok(None) };
    let opened = LeftDestination::open(left.machine());
    let begun = opened.and_then(|vm| Ok((vm.run_beside(path)?, vm)));
    let (starting, mut vm) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            left.abandon();
            return Err(refused(error));
        }
    };
    if !arguments.json {
        eprintln!(
            "godwit: the guest runs here, and a godwit that was killed has left memory of it \
             missing: the source is waited for"
        );
    }
    tell_bound(arguments, &address, None, options.confined);
    let followed = follow(&mut vm, &listener, left, &options, cancel, notice);
    // Who leaves off waits for nothing more.
    let received = followed.map_err(RequestError::Failed)?;
    starting.map_or(Ok(()), Starting::finish).map_err(|error| {
        let words = format!(
            "all of the guest's memory is here, and it does not run ({error}): godwit recover \
             --vm qemu:{} --guest here",
            path.display()
        );
        let (phase, survivor) = (Phase::Handover, Survivor::Unknown);
        RequestError::Failed(Failure { phase, survivor, cause: EngineError::Vm(words.into()) })
    })?;
    Ok(Some((received, process::cost())))
}

/// Takes a guest into a QEMU that is started for it.
fn take_into_started(
    arguments: &Arguments,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
    again: &mut Option<Again>,
) -> Result<(Received, Cost), RequestError> {
    let json = arguments.json;
    let vm = StartedDestination::new(StartTerms {
        emulator: arguments.emulator.clone(),
        mappings: arguments.map.clone(),
        scripts: arguments.script.clone(),
        dry_run: arguments.dry_run,
        godwit: PathBuf::from(process::THIS_PROGRAM),
        disks: arguments.disks.clone(),
        announce: arguments.announce,
        in_place: None,
        command: None,
        told: Box::new(move |shown| tell_shown(shown, json)),
    });
    let mut vm = vm.map_err(|error| RequestError::Refused(error.into()))?;
    take_into(&mut vm, (arguments, None), cancel, notice, again, |vm| {
        if vm.has_shown() { Again::Shown } else { Again::Ended }
    })
}

/// Takes a guest into `vm`, with its record at a path; where that fails, `after` says what another
/// attempt needs.
fn take_into<V: DestinationVm>(
    vm: &mut V,
    (arguments, record): (&Arguments, Option<PathBuf>),
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
    again: &mut Option<Again>,
    after: impl FnOnce(&V) -> Again,
) -> Result<(Received, Cost), RequestError> {
    let taken = listen(vm, (arguments, record), cancel, notice);
    if let Err(RequestError::Failed(_)) = &taken {
        *again = Some(after(vm));
    }
    taken
}

pub(crate) fn tell_shown(shown: &Shown, json: bool) {
    match shown {
        Shown::CommandLine { words, left_out } if json => {
            json_line(&json!({ "event": "command", "command": words, "left_out": left_out }));
        }
        Shown::CommandLine { words, left_out } => {
            // To be copied, so it is not wrapped.
            eprintln!("the destination QEMU:\n  {}", say::line(words));
            if !left_out.is_empty() {
                let left_out = say::line(left_out.join(", "));
                eprintln!("left out of the source's options: {left_out}");
            }
        }
        Shown::Started { pid, monitor, log } if json => {
            json_line(&json!({ "event": "started", "pid": pid, "monitor": monitor, "log": log }));
        }
        Shown::Started { pid, monitor, log } => {
            let (monitor, log) = (monitor.display(), log.display());
            eprintln!("started as process {pid}: its monitor is {monitor}, its log {log}");
        }
    }
}

/// How connections are taken at the address.
fn security(arguments: &Arguments) -> Result<Security, RequestError> {
    let security = arguments.security.wish().destination(&arguments.listen);
    security.map_err(|error| RequestError::Refused(error.into()))
}

/// Listens, and takes one guest in.
fn listen(
    vm: &mut dyn DestinationVm,
    (arguments, record): (&Arguments, Option<PathBuf>),
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Received, Cost), RequestError> {
    let options = options(arguments, record)?;
    let (listener, address) = bind(arguments)?;
    tell_bound(arguments, &address, advice(&vm.ram()).as_deref(), options.confined);
    let received =
        receive(vm, &listener, &options, cancel, notice).map_err(RequestError::Failed)?;
    Ok((received, process::cost()))
}

/// Opens the port.
fn bind(arguments: &Arguments) -> Result<(Listener, Address), RequestError> {
    let listener = Listener::bind(&arguments.listen);
    let bound = listener.and_then(|l| l.address().map(|address| (l, address)));
    bound.map_err(|source| {
        let error = EngineError::Listen { address: arguments.listen.to_string(), source };
        RequestError::Refused(error.into())
    })
}

/// It is open, at `address`.
fn tell_bound(arguments: &Arguments, address: &Address, advice: Option<&str>, confined: bool) {
    let address = &address.to_string();
    tell_listening(&Listening { address, advice, confined: Some(confined) }, arguments);
}

/// What the operator wants, with a record at a path.
fn options(arguments: &Arguments, record: Option<PathBuf>) -> Result<Options, RequestError> {
    #[allow(clippy::needless_update, reason = "there are more in a build with test hooks")]
    Ok(Options {
        wait: Some(arguments.wait).filter(|wait| !wait.is_zero()),
        security: security(arguments)?,
        codecs: arguments.compression.codecs(),
        disks: arguments.disks.clone(),
        overcommit: arguments.overcommit,
        reconnect: arguments.reconnect,
        record,
        dump: dump_directory(arguments)?,
        post_copy_safe: safe_directory(arguments)?,
        confined: !arguments.unconfined && godwit_confine::is_available(),
        #[cfg(feature = "test-hooks")]
        faults: arguments.hooks.faults(),
        ..Options::default()
    })
}

/// The directory that the source copies to what is missing, which has to be there.
fn safe_directory(arguments: &Arguments) -> Result<Option<PathBuf>, RequestError> {
    let Some(directory) = &arguments.postcopy_safe else { return Ok(None) };
    if directory.is_dir() {
        return Ok(Some(absolute(directory)));
    }
    let shown = directory.display();
    let error = format!("--postcopy-safe {shown}: there is no such directory: mount it first");
    Err(RequestError::Refused(error.into()))
}

/// The directory for dumps of the guest's memory, made if it is not there.
fn dump_directory(arguments: &Arguments) -> Result<Option<PathBuf>, RequestError> {
    let Some(dir) = &arguments.dump else { return Ok(None) };
    let mut made = DirBuilder::new();
    made.recursive(true).mode(0o700);
    let there = made.create(dir).and_then(|()| dir.canonicalize()).and_then(|dir| {
        let taken = dir.read_dir()?.next().is_some();
        if taken { Err(io::ErrorKind::DirectoryNotEmpty.into()) } else { Ok(dir) }
    });
    there.map(Some).map_err(|error| {
        let error = format!("--dump {}: {error}: name an empty directory", dir.display());
        RequestError::Refused(error.into())
    })
}

/// What would make it cheaper, where that is much.
fn advice(ram: &[RamBlock]) -> Option<String> {
    let total: ByteCount = ram.iter().map(|block| block.pages().bytes()).sum();
    let mount = ram.iter().find_map(RamBlock::in_small_pages).filter(|_| total >= WORTH_ADVICE)?;
    let mount = mount.display();
    Some(format!(
        "RAM files on {mount} take half the processor time to fill with huge pages: mount -o \
         remount,huge=within_size {mount}"
    ))
}

/// What is told when the port is open.
struct Listening<'a> {
    address: &'a str,
    advice: Option<&'a str>,
    /// Whether who reads what comes is confined; `None`: its VMM knows.
    confined: Option<bool>,
}

fn tell_listening(told: &Listening<'_>, arguments: &Arguments) {
    let Listening { address, advice, confined } = *told;
    if confined == Some(false) && !arguments.unconfined {
        eprintln!(
            "godwit: this kernel has no system-call filters: the threads that read what comes are \
             not confined"
        );
    }
    if arguments.json {
        json_line(&json!({
            "event": "listening", "address": address, "advice": advice, "confined": confined,
        }));
        return;
    }
    if let Some(advice) = advice {
        eprintln!("{}", layout::wrap("advice: ", advice, 8, layout::width(&std::io::stderr())));
    }
    eprintln!("listening on {address}");
}

/// What another attempt needs after one that failed.
#[derive(Clone, Copy, Debug)]
enum Again {
    /// The VM waits as before.
    Waits,
    /// Libvirt has nothing of it.
    LibvirtWaits,
    /// A QEMU can load a guest once.
    QemuEnded,
    /// The machine has loaded, or ended.
    MicrovmUsedUp,
    /// A QEMU that was started for the attempt, if one was.
    Ended,
    /// Nothing was to be started.
    Shown,
}

impl Again {
    fn cure(self) -> &'static str {
        match self {
            Self::Waits => "the VM goes on waiting: run godwit receive again for another attempt",
            Self::LibvirtWaits => {
                "libvirt has nothing of it left: run godwit receive again for another attempt"
            }
            Self::QemuEnded => {
                "its QEMU has ended, since it can load only once: start it again with -incoming \
                 defer, then godwit receive"
            }
            Self::Ended => {
                "nothing of it is left here: run godwit receive again for another attempt"
            }
            Self::Shown => "it was only to be shown: run godwit receive without --dry-run",
            Self::MicrovmUsedUp => {
                "its machine cannot be used again: start another with --incoming, then godwit \
                 receive"
            }
        }
    }
}

/// The last line for programs, and of the record, of a guest that did not come.
fn failed_line(failure: &Failure, again: Option<Again>) -> Value {
    json!({
        "outcome": match (&failure.cause, failure.survivor) {
            (_, Survivor::Unknown) => "in-doubt",
            (EngineError::Cancelled, _) => "cancelled",
            _ => "failed",
        },
        "phase": failure.phase.to_string(),
        "vm_waits": again.map(|again| matches!(again, Again::Waits | Again::LibvirtWaits)),
        "error": failure.cause.to_string(),
    })
}

fn tell_failure(failure: &Failure, again: Option<Again>, last: Option<&Value>) {
    let guest = match failure.survivor {
        Survivor::Unknown => {
            "IN DOUBT: godwit recover --vm VM, on both sides, tells who has it and what to do"
                .to_owned()
        }
        Survivor::Lost => {
            "the guest is LOST: it ran here before all of its memory was, and a part \
                           of that has ended; end both VMs, and start it again"
                .to_owned()
        }
        _ => match again {
            Some(again) => format!("the guest does not run here; {}", again.cure()),
            None => "the guest does not run here".to_owned(),
        },
    };
    eprintln!("godwit: {}; {guest}", say::line(failure));
    if let Some(last) = last {
        json_line(last);
    }
}
