//! `godwit migrate`.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_confine::Rights;
use godwit_control::messages::{Answer, Cost, DiskWish, Request};
use godwit_control::{client, events};
use godwit_disk::{DiskChoice, parse_granularity};
use godwit_engine::Survivor;
use godwit_engine::address::Address;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::report::{Measures, Progress, Stage};
use godwit_engine::security::SecurityWish;
use godwit_engine::source::{Options, PostCopy, Verify, follow, migrate};
use godwit_qemu::{QemuError, QemuSource, Reporting};
use godwit_units::{ByteCount, GRAMMAR, parse_duration};
use serde_json::Value;

use crate::at_switchover::{Guest, HookArguments, Hooks};
use crate::deadline::{Deadline, OnTimeout};
use crate::layout;
use crate::output::{self, Display, json_line};
use crate::process::{self, FAILED, USAGE};
use crate::processors::ProcessorArguments;
use crate::records::on_off;
use crate::rights;
use crate::say;
use crate::security::SecurityArguments;
use crate::settings::Given;
use crate::steer::Engine;
use crate::under_way::{UnderWay, UnderWayArguments};
use crate::vm::{RequestError, VmName, absolute, domain_wanted, libvirt_uri, refused_qemu};

/// Move the guest of a VM on this host to where `godwit receive` listens.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR, mut_arg("trace", |trace| trace.requires("audit")))]
pub(crate) struct Arguments {
    #[command(flatten)]
    moved: Move,

    #[command(flatten)]
    how: How,
}

/// What `godwit audit` takes as well.
#[derive(Debug, Args)]
pub(crate) struct Move {
    /// The VM: qemu:PATH, where PATH is the unix socket of a QMP monitor that nobody else is
    /// connected to; pid:N, a QEMU by its process, which has such a monitor; libvirt:DOMAIN or
    /// libvirt:DOMAIN@URI, a domain of libvirt's; proxmox:ID, a VM of Proxmox's on this node;
    /// incus:NAME, an instance of Incus's that was given such a monitor; or microvm:PATH, where
    /// PATH is the machine's control socket
    #[arg(long, value_name = "VM")]
    vm: VmName,

    /// Where `godwit receive` listens: HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT
    #[arg(long, value_name = "ADDR")]
    to: Address,

    #[command(flatten)]
    settings: Given,

    #[command(flatten)]
    security: SecurityArguments,

    #[command(flatten)]
    processors: ProcessorArguments,

    #[command(flatten)]
    under_way: UnderWayArguments,

    /// Of an audit (godwit audit, or --audit): write down where each page came from, a line for
    /// each time that one was sent
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Connections that carry pages, 1 to 16; auto: as many as there are processors, 2 to 8, and 8
    /// over a round trip of 5 ms or more, or of a guest with more vCPUs than this host has
    /// processors
    #[arg(long, value_name = "N", default_value = "auto", value_parser = channels)]
    channels: Channels,

    /// How long connections that are lost before the guest is stopped are tried for, while it runs
    /// free; 0s: not at all, the migration then fails at once
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    reconnect: Duration,

    /// Remember a fingerprint of each page (0.2 % of guest memory), so that pages are not sent
    /// again that were written and did not change
    #[arg(long, alias = "ledger", value_name = "on|off", default_value = "on")]
    #[arg(action = clap::ArgAction::Set, value_parser = on_off)]
    fingerprints: bool,

    /// Disks that move along: all, none, or names with commas between. Those that do not must be on
    /// storage that both sides share; those that do need an image of the same size at the
    /// destination, which is overwritten
    #[arg(long, value_name = "all|none|NAME,...", default_value = "none")]
    disks: DiskChoice,

    /// The size of the blocks in which writes to these disks are tracked, 4KiB to 1MiB; auto: as
    /// the guest writes
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = granularity)]
    disk_granularity: Granularity,

    /// Differences between the two VMs that are let pass, by the keys under which they are refused,
    /// with commas between, or all. The guest may then find another machine, or fail to load
    #[arg(long, value_name = "all|KEY,...", value_delimiter = ',')]
    allow_differences: Vec<String>,

    /// Disks that do not move along are on the same storage at both sides, also where godwit cannot
    /// see that: they are not compared
    #[arg(long)]
    disks_are_shared: bool,

    /// Move a guest under KVM also where it may run guests of its own, whose pages the processor
    /// writes unseen: only where none of them runs
    #[arg(long)]
    allow_nested: bool,

    /// Leave the VM stopped at the source instead of ending it
    #[arg(long)]
    keep_source: bool,

    /// Carry to the destination what comes for the guest's cards on tap interfaces while it stands
    /// still, which is lost otherwise, and sent again when the sender's timer has run out
    #[arg(long, value_name = "on|off", default_value = "on")]
    #[arg(action = clap::ArgAction::Set, value_parser = on_off)]
    late_packets: bool,

    /// Remove the definition of a persistent domain of libvirt's from the source when its guest
    /// has left, instead of leaving it shut off
    #[arg(long, conflicts_with = "keep_source")]
    undefine_source: bool,

    /// How long it may take in all. What is done about one that takes longer: see --on-timeout
    /// [default: as long as it takes]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    finish_by: Option<Duration>,

    /// With --finish-by: cancel it, so that the guest stays where it is; force the switchover, so
    /// early that it may end in time, however long the guest is stopped for; or postcopy: switch
    /// over then, and what is left follows
    #[arg(long, value_name = "WHAT", default_value = "cancel", requires = "finish_by")]
    on_timeout: OnTimeout,

    /// Do not confine the thread that reads what the destination says, which else has no capability
    /// and only the system calls of that: for a host where that is in the way
    #[arg(long)]
    unconfined: bool,

    #[command(flatten)]
    switchover: HookArguments,

    /// Print progress and result as lines of JSON on standard output
    #[arg(long)]
    json: bool,

    #[cfg(feature = "test-hooks")]
    #[command(flatten)]
    hooks: crate::hooks::Migrate,
}

/// What cannot be had with an audit, and the audit.
#[derive(Debug, Args)]
#[command(next_help_heading = "Proof, post-copy and resumption")]
struct How {
    /// Prove that all memory arrived. live: it is read back at the destination while the guest
    /// runs, compared before it may run there, and the source's is looked at once more behind that.
    /// arrival: without that last look, which costs more than the rest. stopped: both sides
    /// read all of it while the guest is stopped
    #[arg(
        long,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "live",
        default_value = "no",
        hide_default_value = true
    )]
    verify: Verify,

    /// Hunt for a bug: while the guest is stopped, compare every page of its memory on both sides
    /// with what was sent of it, and explain the first that differs. Where one does, the guest
    /// stays
    #[arg(long, conflicts_with_all = ["verify", "state_dir"])]
    audit: bool,

    /// Whether the guest may run at the destination before all of its memory is there, where what
    /// is left would not fit into the downtime limit: never (but for `godwit switchover
    /// --postcopy`); on-timeout, where it would be given up; "after N" rounds; or now. Who needs a
    /// page that is missing waits for it. The guest is lost if one of both hosts ends meanwhile
    #[arg(long, value_name = "WHEN", default_value = "never")]
    #[arg(conflicts_with_all = ["verify", "audit"])]
    postcopy: PostCopy,

    /// With post-copy: before the guest runs at the destination, copy what it lacks there to a file
    /// in this directory, on storage that both hosts have, encrypted and removed at the end. Should
    /// this host be lost meanwhile, `godwit receive --postcopy-safe` takes the rest from there. The
    /// guest stands still for as long as the copy takes
    #[arg(long, value_name = "DIR")]
    #[arg(conflicts_with_all = ["verify", "audit"])]
    postcopy_safe: Option<PathBuf>,

    /// Where to write down (a file of this user's alone, removed at the end) what another `godwit
    /// migrate` of the same VM needs to take the migration up, should this one be killed before the
    /// guest is stopped: type the same command again, within the destination's --reconnect. Memory
    /// and disks are then compared, and only what differs is sent. For a QEMU
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl How {
    /// That of an audit.
    const AUDIT: Self = Self {
        verify: Verify::Live,
        audit: true,
        postcopy: PostCopy::Never,
        postcopy_safe: None,
        state_dir: None,
    };
}

/// How many; `None`: what suits the processors and the way.
type Channels = Option<u8>;

fn channels(text: &str) -> Result<Channels, String> {
    if text == "auto" {
        return Ok(None);
    }
    let number = text.parse().ok().filter(|number| (1..=16).contains(number));
    number.map(Some).ok_or_else(|| "use 1 to 16, or auto".to_owned())
}

/// As many as there are processors that this command may use.
fn channels_that_fit() -> u8 {
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    processors.clamp(2, 8) as u8
}

/// The size of dirty blocks; `None`: as the guest writes.
type Granularity = Option<ByteCount>;

fn granularity(text: &str) -> Result<Granularity, String> {
    if text == "auto" { Ok(None) } else { parse_granularity(text).map(Some) }
}

/// What a source needs of what root may do, for a QEMU of another user; docs/security.md.
const RIGHTS: Rights = Rights::TRACE
    .and(Rights::MAPPED)
    .and(Rights::FILES)
    .and(Rights::KILL)
    .and(Rights::RESOURCE)
    .and(Rights::PORTS)
    .and(Rights::PACKETS)
    .and(Rights::NICE)
    .and(Rights::SUSPEND);

/// Gives up the others before any thread is started. Managers of VMs are asked by their own
/// programs, which have what they would have by hand.
fn give_up_rights(vm: &VmName) -> io::Result<()> {
    match vm {
        VmName::Qemu(_) | VmName::Microvm(_) => rights::keep_only(RIGHTS),
        VmName::Libvirt { .. } | VmName::Proxmox(_) => Ok(()),
    }
}

/// Runs the command.
pub(crate) fn run(Arguments { moved, how }: &Arguments) -> ExitCode {
    run_as(moved, how)
}

/// Runs `godwit audit`.
pub(crate) fn audit(moved: &Move) -> ExitCode {
    run_as(moved, &How::AUDIT)
}

fn run_as(arguments: &Move, how: &How) -> ExitCode {
    let (vm, to) = (arguments.vm.to_string(), arguments.to.to_string());
    let mut hooks = match Hooks::new(&arguments.switchover, &vm, &to) {
        Ok(hooks) => hooks,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(FAILED);
        }
    };
    if let Err(error) = give_up_rights(&arguments.vm) {
        output::refusal(&error, arguments.json);
        return ExitCode::from(FAILED);
    }
    if let Err(error) = arguments.processors.apply(Some(&arguments.vm)) {
        output::refusal(&error, arguments.json);
        return ExitCode::from(FAILED);
    }
    let cancel = process::cancel_on_signals();
    let handle = match MigrationHandle::typed(arguments.settings.0.clone(), cancel) {
        Ok(handle) => handle,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(USAGE);
        }
    };
    let security = arguments.security.wish();
    let mut options = Options::new(arguments.to.clone());
    match security.source(&arguments.to) {
        Ok(security) => options.security = security,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(FAILED);
        }
    }
    options.verify = if how.audit { Verify::Live } else { how.verify };
    options.post_copy = how.postcopy;
    options.post_copy_safe = how.postcopy_safe.as_deref().map(absolute);
    options.audit = how.audit;
    // The VMM of a microvm, which writes it, may be in another directory.
    options.trace = arguments.trace.as_ref().map(|path| absolute(path));
    (options.channels, options.channels_afar) = match arguments.channels {
        Some(channels) => (channels, 0),
        None => (channels_that_fit(), options.channels_afar),
    };
    options.fingerprints = arguments.fingerprints;
    options.keep_source = arguments.keep_source;
    options.late_packets = arguments.late_packets;
    options.reconnect = arguments.reconnect;
    options.before_switchover = hooks.before();
    options.confined = !arguments.unconfined && godwit_confine::is_available();
    #[cfg(feature = "test-hooks")]
    arguments.hooks.put_into(&mut options);
    let disks =
        DiskWish { choice: arguments.disks.clone(), granularity: arguments.disk_granularity };
    let engine = match &arguments.vm {
        VmName::Qemu(_) | VmName::Libvirt { .. } | VmName::Proxmox(_) => {
            Engine::Here(handle.clone())
        }
        VmName::Microvm(path) => Engine::Microvm(path.clone()),
    };
    let mut under_way = match UnderWay::begin(&arguments.under_way, (vm, to), engine) {
        Ok(under_way) => under_way,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(FAILED);
        }
    };
    let mut display = Display::new(arguments.json);
    let mut deadline = arguments.finish_by.map(|limit| Deadline::new(limit, arguments.on_timeout));
    let guest = hooks.guest();
    let wishes = (&disks, &security);
    let moved = (arguments, how.state_dir.as_deref());
    let result = move_guest(moved, &options, wishes, guest, &handle, &mut |progress| {
        hooks.look(progress);
        under_way.see(progress);
        display.progress(progress);
        if let Some(deadline) = &mut deadline
            // Nothing can be done any more about one that has left.
            && progress.stage != Stage::PostCopy
            && let Some(action) = deadline.look(progress)
        {
            tell_wait(&deadline.words());
            match action {
                OnTimeout::Cancel => handle.cancel().cancel(),
                // What has begun by itself meanwhile need not be told to.
                OnTimeout::Force => {
                    drop(under_way.answer(&Request::SwitchOver { force: true, post_copy: false }));
                }
                OnTimeout::Postcopy => {
                    let request = Request::SwitchOver { force: false, post_copy: true };
                    if let Answer::Refused { error } = under_way.answer(&request) {
                        tell_wait(&format!("{error}; it goes on"));
                    }
                }
            }
        }
    });
    display.finish();
    let last = last_line(&result);
    under_way.end(&last);
    let code = match result {
        Ok((measures, cost)) => {
            tell(&measures, cost, arguments.json.then_some(&last));
            hooks.end(Some("migrated"));
            ExitCode::SUCCESS
        }
        Err(RequestError::Refused(error)) => {
            output::refusal(&error, arguments.json);
            hooks.end(None);
            ExitCode::from(FAILED)
        }
        Err(RequestError::Failed(failure)) => {
            output::failure(&failure, arguments.json);
            hooks.end(last["outcome"].as_str());
            match deadline.is_some_and(|deadline| deadline.has_cancelled()) {
                // Nobody has typed Ctrl-C.
                true if failure.survivor == Survivor::Source => ExitCode::from(FAILED),
                _ => process::exit_code(&failure),
            }
        }
    };
    under_way.settle();
    code
}

/// How it ended, for programs.
fn last_line(result: &Result<(Measures, Cost), RequestError>) -> Value {
    match result {
        Ok((measures, cost)) => events::migrated(measures, *cost),
        Err(RequestError::Refused(error)) => events::refused(error),
        Err(RequestError::Failed(failure)) => events::failed(failure),
    }
}

/// The engine is in this process for a QEMU, and in the VMM's for a microvm.
fn move_guest(
    (arguments, state_dir): (&Move, Option<&Path>),
    options: &Options,
    (disks, security): (&DiskWish, &SecurityWish),
    guest: Option<Guest>,
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(Measures, Cost), RequestError> {
    match &arguments.vm {
        VmName::Qemu(_) | VmName::Proxmox(_) | VmName::Microvm(_) if arguments.undefine_source => {
            let words = "--undefine-source is for domains of libvirt's (--vm libvirt:DOMAIN)";
            Err(RequestError::Refused(words.into()))
        }
        VmName::Microvm(_) if options.before_switchover.is_some() => {
            let words = "--hook-before is for a QEMU: what moves a microvm is its own process, \
                         which waits for nobody";
            Err(RequestError::Refused(words.into()))
        }
        VmName::Microvm(_) if state_dir.is_some() => {
            let words = "--state-dir is for a QEMU: what moves a microvm is its own process, and \
                         ends with it";
            Err(RequestError::Refused(words.into()))
        }
        VmName::Qemu(path) => {
            let refused = |error| RequestError::Refused(refused_qemu(path, error));
            let vm = QemuSource::open(path).map_err(refused)?;
            let vm = prepare(vm, arguments, disks).map_err(refused)?;
            move_qemu(vm, (arguments, state_dir), options, guest, handle, progress)
        }
        VmName::Libvirt { domain, uri } => {
            domain_wanted(domain).map_err(RequestError::Refused)?;
            let uri = libvirt_uri(uri.as_deref());
            let vm = QemuSource::open_domain(domain, &uri, arguments.undefine_source);
            let vm = vm.and_then(|vm| prepare(vm, arguments, disks));
            let vm = vm.map_err(|error| RequestError::Refused(error.into()))?;
            move_qemu(vm, (arguments, state_dir), options, guest, handle, progress)
        }
        VmName::Proxmox(id) => {
            let vm = QemuSource::open_proxmox(id).and_then(|vm| prepare(vm, arguments, disks));
            let vm = vm.map_err(|error| RequestError::Refused(error.into()))?;
            move_qemu(vm, (arguments, state_dir), options, guest, handle, progress)
        }
        VmName::Microvm(path) => {
            Ok(client::migrate(path, options, (disks, security), handle, progress)?)
        }
    }
}

/// What the operator wants of a QEMU, before anything of it is changed.
fn prepare(vm: QemuSource, arguments: &Move, disks: &DiskWish) -> Result<QemuSource, QemuError> {
    if vm.left().is_some() {
        // Its guest has gone, and is to be followed.
        return Ok(vm.telling(tell_wait));
    }
    let vm = if arguments.allow_nested { vm } else { vm.without_nested()? };
    let vm = match &disks.choice {
        DiskChoice::None => vm,
        choice => vm.with_disks(choice, disks.granularity)?,
    };
    let vm = vm.guarded(Path::new(process::THIS_PROGRAM))?;
    let vm = vm.allowing(&arguments.allow_differences);
    let vm = if arguments.disks_are_shared { vm.sharing_disks() } else { vm };
    Ok(vm.telling(tell_wait))
}

fn move_qemu(
    mut vm: QemuSource,
    (arguments, state_dir): (&Move, Option<&Path>),
    options: &Options,
    guest: Option<Guest>,
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(Measures, Cost), RequestError> {
    let mut options = options.clone();
    if let Some(guest) = guest {
        // As with the hint below; and long before the guest stands still.
        guest.is(vm.identity().unwrap_or_default());
    }
    if let Some(left) = vm.left().map(Path::to_owned) {
        tell_wait(
            "a godwit that was killed has sent this guest away without all of its memory: what is \
             missing follows from here",
        );
        options.follow_record = Some(left);
        let measures = follow(&mut vm, &options, handle, progress).map_err(RequestError::Failed)?;
        return Ok((measures, process::cost()));
    }
    // As with the hint below, a monitor that fails is told of later.
    output::disks(&vm.disk_list().unwrap_or_default(), arguments.json);
    // Only a hint: a monitor that fails now is told of by the migration.
    if let Some(advice) =
        vm.reporting().ok().filter(|_| !arguments.json).and_then(Reporting::advice)
    {
        let width = layout::width(&std::io::stderr());
        eprintln!("{}", layout::wrap("advice: ", advice, 8, width));
    }
    // Without one a guest that left early is lost with this process.
    let follow_record = vm.follow_record();
    options.follow_record =
        Some(follow_record.map_err(|error| RequestError::Refused(error.into()))?);
    if let Some(directory) = state_dir {
        options.record = Some(vm.record_in(directory));
    }
    let measures = migrate(&mut vm, &options, handle, progress).map_err(RequestError::Failed)?;
    Ok((measures, process::cost()))
}

/// The line of progress stands still meanwhile, and is written again behind it.
fn tell_wait(what: &str) {
    if std::io::stderr().is_terminal() {
        say::rewrite_line();
    }
    eprintln!("godwit: {}", say::line(what));
}

/// Tells how it ended, to programs by the `last` line.
fn tell(measures: &Measures, cost: Cost, last: Option<&Value>) {
    let Cost { cpu_ms, peak_rss_bytes: rss } = cost;
    if let Some(last) = last {
        json_line(last);
    } else {
        let width = layout::width(&std::io::stdout());
        print!("migrated\n{}", output::measures_text(measures, cpu_ms, rss, width));
        if let Some(audit) = &measures.audit {
            println!("audit of {}: {audit}", audit.pages);
        }
    }
}
