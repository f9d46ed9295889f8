//! `godwit microvm`: run one, and talk to it.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use godwit_confine::Rights;
use godwit_control::client;
use godwit_control::messages::{Plugged, Request};
use godwit_engine::Cancel;
use godwit_microvm::control as server;
use godwit_microvm::{
    BalloonFeatures, BlockPlan, GuestMode, GuestPlan, Machine, MachineEvent, MachinePlan,
    MicrovmError, TrackerKind, plain_layout,
};
use godwit_units::{ByteCount, GRAMMAR};

use crate::layout;
use crate::output;
use crate::process::{CANCELLED, FAILED, cancel_on_signals};
use crate::rights;
use crate::say;

/// The guest cannot go on.
const GUEST_DIED: u8 = 4;
/// For what is to be said to the other side of a migration, and to who watches it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A small VM with godwit inside, for those who have no QEMU and those who write VMMs.
///
/// It runs one guest, a program on the bare machine that stamps its memory and disk, checks them
/// all the time, prints ten heartbeats a second and says BUG if anything is wrong. Needs /dev/kvm.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a machine until it ends. Ctrl-C ends it.
    Run(Box<Run>),
    /// Print what a machine is and does, as JSON
    Status(Socket),
    /// Stop the guest of a machine
    Pause(Socket),
    /// Run it on
    Resume(Resume),
    /// Ask the guest of a machine with a balloon to give memory back to the host
    Balloon(Balloon),
    /// Plug memory into a machine while its guest runs, or while it waits for one
    Plug(Plug),
    /// End a machine
    Quit(Quit),
}

/// Which machine.
#[derive(Debug, Args)]
pub(crate) struct Socket {
    /// The machine's control socket
    #[arg(value_name = "SOCKET")]
    path: PathBuf,
}

/// Which machine, and how sure it is.
#[derive(Debug, Args)]
pub(crate) struct Resume {
    #[command(flatten)]
    socket: Socket,

    /// Also a guest that is in doubt after a migration: you have seen that it does not run at the
    /// destination, and never will. If it did, it would run twice
    #[arg(long)]
    force: bool,
}

/// Which machine, and whatever becomes of its guest.
#[derive(Debug, Args)]
pub(crate) struct Quit {
    #[command(flatten)]
    socket: Socket,

    /// Also one whose guest runs, here or at the other side, before all of its memory is there: the
    /// guest is lost
    #[arg(long)]
    force: bool,
}

/// How much memory to give back.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Balloon {
    #[command(flatten)]
    socket: Socket,

    /// In all, out of what it does not use; 0: the guest may use all of its memory again. `godwit
    /// microvm status` tells how much it has given
    #[arg(value_name = "SIZE")]
    size: ByteCount,
}

/// What memory to plug in.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Plug {
    #[command(flatten)]
    socket: Socket,

    /// How much, 1MiB or more
    #[arg(value_name = "SIZE")]
    size: ByteCount,

    /// Memory slots that it is to have
    #[arg(long, value_name = "N", default_value_t = 1)]
    slots: usize,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What machine to run.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Run {
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "256MiB", conflicts_with = "block")]
    memory: ByteCount,

    /// Keep the memory in this new file on a tmpfs [default: one without a name]
    #[arg(long, value_name = "FILE", conflicts_with = "block")]
    memory_path: Option<PathBuf>,

    /// Instead, memory in blocks: name=NAME,size=SIZE,gpa=ADDRESS[,host-offset=BYTES][,path=FILE];
    /// one at 0
    #[arg(long, value_name = "BLOCK")]
    block: Vec<BlockPlan>,

    /// Memory slots that KVM is to have
    #[arg(long, value_name = "N", default_value_t = 1)]
    slots: usize,

    /// vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,

    /// A raw disk image; the guest writes to its first 16 MiB. Both sides of a migration open the
    /// same
    #[arg(long, value_name = "IMAGE")]
    disk: Option<PathBuf>,

    /// Give the guest a balloon that takes hints about free pages during a migration, reports of
    /// free pages at any time, or both
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    balloon: Vec<BalloonName>,

    /// Listen here for `godwit migrate`, `godwit receive` and the commands of `godwit microvm`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,

    /// Wait for a guest to arrive instead of starting one
    #[arg(long, requires = "control")]
    incoming: bool,

    /// Where the serial line goes [default: standard output]
    #[arg(long, value_name = "FILE")]
    serial: Option<PathBuf>,

    /// What is to know which pages were written
    #[arg(long, default_value = "kvm-log")]
    tracker: TrackerName,

    /// What the guest does
    #[arg(long, default_value = "rate")]
    mode: ModeName,

    /// Pages the guest writes each second in the modes rate, hot-cold, hot-tenth and sequential; 0:
    /// as fast as it can
    #[arg(long, value_name = "PAGES", default_value_t = 2000)]
    rate: u64,

    /// The memory that the guest stamps and checks [default: half of what is free]
    #[arg(long, value_name = "SIZE")]
    fill: Option<ByteCount>,

    /// The part of it that the guest writes to [default: at most 128MiB]
    #[arg(long, value_name = "SIZE")]
    working_set: Option<ByteCount>,

    #[cfg(feature = "test-hooks")]
    #[command(flatten)]
    placed: crate::hooks::Placed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum TrackerName {
    /// KVM's dirty log
    KvmLog,
    /// KVM's dirty ring
    KvmRing,
    /// Write protection in the VMM's page tables
    Pagemap,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BalloonName {
    /// Free pages are not sent
    Hints,
    /// Free pages are given back to the host
    Reporting,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// Almost nothing
    Idle,
    /// Write so many pages a second, at random
    Rate,
    /// Write as fast as it can, at random
    Full,
    /// Write few pages often and many seldom, by Zipf's law
    HotCold,
    /// Write nine times of ten to a tenth of the working set
    HotTenth,
    /// Write one page after the other
    Sequential,
    /// Free pages and take others for them all the time; the working set is what is in use
    Churn,
    /// Work for a second, then fault for good, to see how that is told
    Crash,
}

/// Runs the command.
pub(crate) fn run(command: &Command) -> ExitCode {
    let outcome = match command {
        Command::Run(arguments) => run_machine(arguments),
        Command::Status(socket) => {
            client::status(&socket.path).map_err(MicrovmError::from).map(|status| {
                output::json_line(&serde_json::to_value(status).unwrap_or_default());
                ExitCode::SUCCESS
            })
        }
        Command::Pause(socket) => told(&socket.path, &Request::Pause, "the guest is paused"),
        Command::Resume(Resume { socket, force }) => {
            told(&socket.path, &Request::Resume { force: *force }, "the guest runs")
        }
        Command::Balloon(balloon) => {
            let (path, request) =
                (&balloon.socket.path, Request::Balloon { bytes: balloon.size.0 });
            let asked = format!(
                "the guest is asked to give back {} in all; `godwit microvm status` tells how far \
                 it is",
                balloon.size
            );
            told(path, &request, &asked)
        }
        Command::Plug(arguments) => plug(arguments),
        Command::Quit(Quit { socket, force }) => {
            told(&socket.path, &Request::Quit { force: *force }, "the machine ends")
        }
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("godwit: {}", say::line(error));
        ExitCode::from(FAILED)
    })
}

/// Has a request carried out, and says what is so now.
fn told(path: &std::path::Path, request: &Request, now: &str) -> Result<ExitCode, MicrovmError> {
    client::command(path, request)?;
    let label = format!("microvm:{}: ", path.display());
    println!("{}", layout::wrap(&label, now, 2, layout::width(&std::io::stdout())));
    Ok(ExitCode::SUCCESS)
}

fn plug(arguments: &Plug) -> Result<ExitCode, MicrovmError> {
    let (path, json) = (&arguments.socket.path, arguments.json);
    let plugged = match client::plug(path, arguments.size, arguments.slots) {
        Ok(plugged) => plugged,
        Err(error) => {
            output::refusal(&error, json);
            return Ok(ExitCode::from(FAILED));
        }
    };
    if let Some(warning) = &plugged.warning {
        eprintln!("godwit: plugged in, but {}", say::line(warning));
    }
    if json {
        output::json_line(&serde_json::to_value(&plugged).unwrap_or_default());
        return Ok(ExitCode::SUCCESS);
    }
    let Plugged { block, gpa, bytes, slots, warning: _ } = plugged;
    let text = format!(
        "{} plugged in at {gpa:#x} as block '{block}'; it has {slots} memory slots now. A machine \
         that is to take the guest in needs the same memory: plug it in there, too",
        ByteCount(bytes)
    );
    let label = format!("microvm:{}: ", path.display());
    println!("{}", layout::wrap(&label, &text, 2, layout::width(&std::io::stdout())));
    Ok(ExitCode::SUCCESS)
}

/// What a machine needs of what root may do: to hold its own guest back (userfaultfd(2), and in
/// time), to go on where memory is short, and ports and files that are somebody else's.
const RIGHTS: Rights =
    Rights::TRACE.and(Rights::NICE).and(Rights::RESOURCE).and(Rights::PORTS).and(Rights::FILES);

fn run_machine(arguments: &Run) -> Result<ExitCode, MicrovmError> {
    // Before any thread is started.
    rights::keep_only(RIGHTS)
        .map_err(|source| MicrovmError::System { action: "give up rights of root's", source })?;
    #[cfg(feature = "test-hooks")]
    arguments.placed.open().map_err(|source| MicrovmError::System {
        action: "open the file for what is placed",
        source,
    })?;
    let cancel = cancel_on_signals();
    let blocks = match &arguments.block[..] {
        [] => plain_layout(arguments.memory, arguments.memory_path.clone()),
        blocks => blocks.to_vec(),
    };
    let plan = MachinePlan {
        blocks,
        slots: arguments.slots,
        cpus: arguments.cpus,
        disk: arguments.disk.clone(),
        balloon: (!arguments.balloon.is_empty()).then(|| BalloonFeatures {
            hints: arguments.balloon.contains(&BalloonName::Hints),
            reporting: arguments.balloon.contains(&BalloonName::Reporting),
        }),
        tracker: match arguments.tracker {
            TrackerName::KvmLog => TrackerKind::KvmLog,
            TrackerName::KvmRing => TrackerKind::KvmRing,
            TrackerName::Pagemap => TrackerKind::Pagemap,
        },
    };
    let guest = GuestPlan {
        mode: match arguments.mode {
            ModeName::Idle => GuestMode::Idle,
            ModeName::Rate => GuestMode::Rate,
            ModeName::Full => GuestMode::Full,
            ModeName::HotCold => GuestMode::HotCold,
            ModeName::HotTenth => GuestMode::HotTenth,
            ModeName::Sequential => GuestMode::Sequential,
            ModeName::Churn => GuestMode::Churn,
            ModeName::Crash => GuestMode::Crash,
        },
        rate: arguments.rate,
        fill: arguments.fill,
        working_set: arguments.working_set,
        disk_on_ports: false,
        card_on_ports: None,
    };
    let output: Box<dyn Write + Send> = match &arguments.serial {
        None => Box::new(std::io::stdout()),
        Some(path) => Box::new(File::create(path).map_err(|source| MicrovmError::System {
            action: "create the file for the serial line",
            source,
        })?),
    };
    let (events_in, events) = channel();
    let guest = Some(&guest).filter(|_| !arguments.incoming);
    let machine = Arc::new(Machine::new(&plan, guest, output, &events_in)?);
    if machine.tracking().contains("fallback") {
        eprintln!("godwit: writes are tracked by the {}", machine.tracking());
    }
    let state = if arguments.incoming { server::State::Incoming } else { server::State::Here };
    let serve = |path: &PathBuf| server::serve(&machine, state, path, &events_in);
    let served = arguments.control.as_ref().map(serve).transpose()?;
    if !arguments.incoming {
        machine.run();
    }
    let code = await_end(&events, &cancel);
    machine.set_ended();
    if let Some(served) = &served {
        served.settle(LAST_WORDS);
    }
    // Conversations on the control socket still hold the machine; its files go with the process.
    machine.ram().remove_names();
    Ok(ExitCode::from(code))
}

fn await_end(events: &Receiver<MachineEvent>, cancel: &Cancel) -> u8 {
    loop {
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(MachineEvent::PoweredOff | MachineEvent::Quit) => return 0,
            Ok(MachineEvent::Died(error)) => {
                eprintln!("godwit: {}", say::line(error));
                return GUEST_DIED;
            }
            Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => return CANCELLED,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return FAILED,
        }
    }
}
