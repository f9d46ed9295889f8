//! `godwit upgrade`: both sides of a migration within this process, to a QEMU that is started with
//! the memory of the old one, or with as much of its own.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use clap::Args;
use godwit_control::events;
use godwit_control::messages::Cost;
use godwit_control::steer::Socket;
use godwit_disk::DiskChoice;
use godwit_engine::address::{Address, Listener};
use godwit_engine::handle::MigrationHandle;
use godwit_engine::report::Measures;
use godwit_engine::{Cancel, EngineError, Failure, destination, source};
use godwit_qemu::{
    InPlace, Mapping, QemuError, QemuSource, StartTerms, StartedDestination, Successor,
};
use godwit_units::{GRAMMAR, format_duration};
use serde_json::{Value, json};

use crate::output::{self, Display, json_line};
use crate::process::{self, FAILED, USAGE};
use crate::receive::tell_shown;
use crate::run_directory::{self, MEETING};
use crate::say;
use crate::settings::Given;
use crate::steer::Engine;
use crate::under_way::{UnderWay, UnderWayArguments};
use crate::vm::{RequestError, VmName, refused_qemu};

/// Change the QEMU under a guest that goes on, on this host.
///
/// Where memory is in files or memfds with share=on the new QEMU maps that of the old one, and
/// nothing is copied: the guest is stopped for as long as its devices take to be saved and loaded,
/// whatever its size. Memory of the old QEMU's own is copied within this host while the guest runs,
/// and is there twice until the old one ends. Whatever fails before the new QEMU has the guest
/// leaves it running in the old one.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    /// The VM: qemu:PATH, where PATH is the unix socket of a QMP monitor that nobody else is
    /// connected to; pid:N, a QEMU by its process, which has such a monitor; or that PATH alone
    #[arg(long, value_name = "VM", value_parser = vm)]
    vm: VmName,

    /// The QEMU to start, with the options of the old one [default: the one on PATH that is called
    /// as the old one's is]
    #[arg(long, value_name = "PATH", conflicts_with = "exec")]
    program: Option<PathBuf>,

    /// Instead, the whole command line of the new QEMU, with quotes as a shell has them and nothing
    /// else of a shell's: the same memory back ends and machine, other sockets than the old one's.
    /// -incoming defer and a monitor are added
    #[arg(long, value_name = "COMMAND", value_parser = words)]
    exec: Option<Words>,

    /// A file or directory of the old command line that is another one for the new QEMU; more than
    /// once for several
    #[arg(long, value_name = "/OLD=/NEW", conflicts_with = "exec")]
    map: Vec<Mapping>,

    /// A program that QEMU may run for a network card (script=, downscript=, helper=); more than
    /// once for several
    #[arg(long, value_name = "PROGRAM", conflicts_with = "exec")]
    script: Vec<PathBuf>,

    /// Show what would be started, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Differences between the two machines that are let pass, by the keys under which they are
    /// refused, with commas between, or all. The guest may then fail to load, and goes on in the
    /// old QEMU
    #[arg(long, value_name = "all|KEY,...", value_delimiter = ',')]
    allow_differences: Vec<String>,

    /// Where memory has to be copied: also if this host, or the control group of this command, may
    /// not have room for it twice; when memory runs out, the kernel ends the new QEMU first, as
    /// long as the guest runs in the old one
    #[arg(long)]
    overcommit: bool,

    /// Where memory has to be copied: also of a guest under KVM that may run guests of its own,
    /// whose pages the processor writes unseen: only where none of them runs
    #[arg(long)]
    allow_nested: bool,

    #[command(flatten)]
    settings: Given,

    #[command(flatten)]
    under_way: UnderWayArguments,

    #[cfg(feature = "test-hooks")]
    #[command(flatten)]
    hooks: crate::hooks::Migrate,

    /// Print events and result as lines of JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Connections that carry pages where memory is copied: a thread at either end of each.
const CHANNELS: u8 = 2;

/// A command line, program first.
type Words = Vec<String>;

/// A VM's name; what begins with a / is a monitor.
fn vm(text: &str) -> Result<VmName, String> {
    if text.starts_with('/') { Ok(VmName::Qemu(text.into())) } else { text.parse() }
}

/// The words of a command, as a shell parts them.
fn words(text: &str) -> Result<Words, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, quote) {
            ('\\', None | Some('"')) => {
                let next = rest.next().ok_or("it ends with a backslash")?;
                word.get_or_insert_default().push(next);
            }
            (c, Some(open)) if c == open => quote = None,
            ('\'' | '"', None) => {
                word.get_or_insert_default();
                quote = Some(c);
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, None) if "$`;|&<>*?~#".contains(c) && !(c == '#' && word.is_some()) => {
                return Err(format!("no shell reads it: write {c} between single quotes"));
            }
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    words.extend(word);
    if words.is_empty() { Err("it names no program".to_owned()) } else { Ok(words) }
}

/// What came of it.
struct Upgraded {
    measures: Measures,
    successor: Option<Successor>,
    /// Whether memory was copied.
    copied: bool,
    old: ((u64, u64, u64), i32),
    /// What is not as it should be, with the guest in its new process.
    remarks: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let cancel = process::cancel_on_signals();
    let handle = match MigrationHandle::typed(settings(arguments), cancel) {
        Ok(handle) => handle,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(USAGE);
        }
    };
    let names = (arguments.vm.to_string(), new_one(arguments));
    let mut under_way =
        match UnderWay::begin(&arguments.under_way, names, Engine::Both(handle.clone())) {
            Ok(under_way) => under_way,
            Err(error) => {
                output::refusal(&error, arguments.json);
                return ExitCode::from(FAILED);
            }
        };
    let result = upgrade(arguments, &handle, &mut under_way);
    let last = last_line(&result);
    under_way.end(&last);
    let code = match result {
        Ok(upgraded) => {
            if arguments.json {
                json_line(&last);
            }
            if let Some(upgraded) = upgraded {
                tell(&upgraded, arguments.json);
            }
            ExitCode::SUCCESS
        }
        Err(RequestError::Refused(error)) => {
            output::refusal(&error, arguments.json);
            ExitCode::from(FAILED)
        }
        Err(RequestError::Failed(failure)) => {
            output::failure(&failure, arguments.json);
            process::exit_code(&failure)
        }
    };
    under_way.settle();
    code
}

/// Where the guest goes, in words.
fn new_one(arguments: &Arguments) -> String {
    let commanded = arguments.exec.iter().flatten().next().map(String::as_str);
    let named = arguments.program.as_ref().map(|program| program.to_string_lossy());
    let program = commanded.or(named.as_deref()).unwrap_or("another QEMU");
    format!("{program} on this host")
}

/// How it ended, for programs.
fn last_line(result: &Result<Option<Upgraded>, RequestError>) -> Value {
    match result {
        Ok(Some(upgraded)) => upgraded.line(process::cost()),
        Ok(None) => json!({ "outcome": "shown" }),
        Err(RequestError::Refused(error)) => events::refused(error),
        Err(RequestError::Failed(failure)) => events::failed(failure),
    }
}

/// Moves the guest; `None` if it was only to be shown how.
fn upgrade(
    arguments: &Arguments,
    handle: &MigrationHandle,
    under_way: &mut UnderWay,
) -> Result<Option<Upgraded>, RequestError> {
    let VmName::Qemu(path) = &arguments.vm else {
        let words = "an upgrade is for a QEMU that is reached by its own monitor: qemu:PATH or \
                     pid:N; managers of VMs start theirs themselves";
        return Err(RequestError::Refused(words.into()));
    };
    let refused = |error: QemuError| RequestError::Refused(refused_qemu(path, error));
    let mut old = QemuSource::open(path)
        .and_then(QemuSource::whole)
        .and_then(QemuSource::staying_in_place)
        .and_then(|vm| check_copy(vm, arguments))
        .and_then(|vm| vm.guarded(Path::new(process::THIS_PROGRAM)))
        .map_err(refused)?
        .allowing(&arguments.allow_differences)
        .telling(|what| eprintln!("godwit: {}", say::line(what)));
    let memory = old.in_place();
    let copied = memory.as_ref().is_some_and(|memory| memory.is_copied());
    let new = StartedDestination::new(terms(arguments, memory.clone())).map_err(refused)?;
    let (listener, address, _meeting) = listener()?;
    if !copied {
        // There is nothing to wait for: of the downtime hardly anything could be foreseen where
        // hardly a byte is sent.
        let told = handle.switch_over(true);
        told.map_err(|error| RequestError::Refused(error.to_string().into()))?;
    }
    let was = (old.version(), old.pid());
    let ways = (&listener, &address);
    let (moved, has_shown) = move_guest(&mut old, new, ways, (handle, under_way), arguments);
    if let (Err(_), Some(memory)) = (&moved, &memory) {
        memory.drop_names();
    }
    let measures = match moved {
        Err(_) if has_shown => return Ok(None),
        moved => moved.map_err(RequestError::Failed)?,
    };
    let mut remarks = Vec::new();
    if old.ends() {
        let named = memory.as_ref().map_or(Ok(()), |memory| memory.take_names());
        remarks.extend(named.err().map(|error| error.to_string()));
    } else {
        remarks.push(format!(
            "the old QEMU (process {}) was told to end and has not, and keeps the names of its \
             sockets",
            was.1
        ));
    }
    let successor = memory.and_then(|memory| memory.successor());
    Ok(Some(Upgraded { measures, successor, copied, old: was, remarks }))
}

/// What the migration begins with, where the operator does not say otherwise.
fn settings(arguments: &Arguments) -> Vec<(String, String)> {
    let mut typed = arguments.settings.0.clone();
    // Within a host bytes cost less than what makes them fewer.
    if !typed.iter().any(|(name, _)| name == "compression") {
        typed.push(("compression".to_owned(), "none".to_owned()));
    }
    typed
}

/// Refuses a copy that the guest, or this host, is not fit for, and says that there is to be one.
fn check_copy(vm: QemuSource, arguments: &Arguments) -> Result<QemuSource, QemuError> {
    let Some(memory) = vm.in_place().filter(|memory| memory.is_copied()) else { return Ok(vm) };
    if !arguments.overcommit {
        memory.check_room()?;
    }
    let vm = if arguments.allow_nested { vm } else { vm.without_nested()? };
    if !arguments.json {
        eprintln!(
            "godwit: the guest's memory is the old QEMU's own: it is copied, and there twice until \
             that has ended"
        );
    }
    Ok(vm)
}

fn terms(arguments: &Arguments, in_place: Option<std::sync::Arc<InPlace>>) -> StartTerms {
    let json = arguments.json;
    StartTerms {
        emulator: arguments.program.clone(),
        mappings: arguments.map.clone(),
        scripts: arguments.script.clone(),
        dry_run: arguments.dry_run,
        godwit: PathBuf::from(process::THIS_PROGRAM),
        disks: DiskChoice::None,
        announce: None,
        in_place,
        command: arguments.exec.clone(),
        told: Box::new(move |shown| tell_shown(shown, json)),
    }
}

/// Where the two sides meet: a socket in a directory of this user's alone, whose file goes with the
/// last of what is returned.
fn listener() -> Result<(Listener, Address, Socket), RequestError> {
    let directory = godwit_qemu::run_directory::path();
    let refused = |error: String| RequestError::Refused(error.into());
    let (name, user) = (std::process::id().to_string(), rustix::process::getuid().as_raw());
    let met = run_directory::listen(&directory, (&name, MEETING), user).map_err(refused)?;
    let (listener, socket) = met;
    let address = Address::Unix(directory.join(format!("{name}.{MEETING}")));
    let listener = Listener::inherited(listener).map_err(|source| {
        let error = EngineError::Listen { address: address.to_string(), source };
        RequestError::Refused(error.into())
    })?;
    Ok((listener, address, socket))
}

/// Runs both sides to their ends; and whether the new one has only shown what it would start.
fn move_guest(
    old: &mut QemuSource,
    mut new: StartedDestination,
    (listener, address): (&Listener, &Address),
    (handle, under_way): (&MigrationHandle, &mut UnderWay),
    arguments: &Arguments,
) -> (Result<Measures, Failure>, bool) {
    let copied = old.in_place().is_some_and(|memory| memory.is_copied());
    let mut options = source::Options::new(address.clone());
    // Connections within a process are not lost; and where no page is sent none is to be
    // remembered.
    (options.reconnect, options.fingerprints) = (std::time::Duration::ZERO, copied);
    options.channels = if copied { CHANNELS } else { 1 };
    #[cfg(feature = "test-hooks")]
    arguments.hooks.put_into(&mut options);
    let mut display = copied.then(|| Display::new(arguments.json));
    let taking = destination::Options {
        // It was looked at before anything was started, unless that was not wanted.
        overcommit: true,
        reconnect: std::time::Duration::ZERO,
        ..destination::Options::default()
    };
    // Only the source is cancelled, which tells the other side.
    let over = Cancel::default();
    thread::scope(|scope| {
        let stop = over.clone();
        let taken = scope.spawn(move || {
            let taken = destination::receive(&mut new, listener, &taking, &stop, &mut |_| {});
            (taken, new.has_shown())
        });
        let moved = source::migrate(old, &options, handle, &mut |progress| {
            under_way.see(progress);
            if let Some(display) = &mut display {
                display.progress(progress);
            }
        });
        if let Some(display) = &mut display {
            display.finish();
        }
        if moved.is_err() {
            over.cancel();
        }
        let shown = taken.join().is_ok_and(|(_, shown)| shown);
        (moved, shown)
    })
}

fn version((major, minor, micro): (u64, u64, u64)) -> String {
    format!("{major}.{minor}.{micro}")
}

impl Upgraded {
    /// For programs.
    fn line(&self, cost: Cost) -> Value {
        let Self { measures, successor, copied, old, remarks } = self;
        let own = json!({
            "outcome": "upgraded",
            "memory": if *copied { "copied" } else { "in-place" },
            "pid": successor.map(|new| new.pid),
            "version": successor.map(|new| version(new.version)),
            "old_pid": old.1,
            "old_version": version(old.0),
            "remarks": remarks,
        });
        let mut line = events::migrated(measures, cost);
        if let (Value::Object(line), Value::Object(own)) = (&mut line, own) {
            line.extend(own);
        }
        line
    }
}

/// For people; what is not as it should be, in any case.
fn tell(upgraded: &Upgraded, json: bool) {
    let Upgraded { measures, successor, copied, old, remarks } = upgraded;
    for remark in remarks {
        eprintln!("godwit: {}", say::line(remark));
    }
    if json {
        return;
    }
    println!(
        "upgraded: the guest runs in process {} (QEMU {}), and was stopped for {}; {}that of QEMU \
         {}, {}, has ended",
        successor.map(|new| new.pid).unwrap_or_default(),
        successor.map(|new| version(new.version)).unwrap_or_default(),
        format_duration(measures.downtime),
        if *copied { format!("its {} were copied; ", measures.ram) } else { String::new() },
        version(old.0),
        old.1,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_parted_as_a_shell_does_and_nothing_else_of_a_shells_is_done() {
        let all = words(r#"/opt/qemu -name 'a b' -append "x=\"1\" y" -d\ e '' "#).unwrap();
        assert_eq!(all, ["/opt/qemu", "-name", "a b", "-append", "x=\"1\" y", "-d e", ""]);
        for (text, word) in
            [("qemu $HOME", "'"), ("qemu 'a", "closed"), ("  ", "program"), ("q \\", "backslash")]
        {
            let told = words(text).unwrap_err();
            assert!(told.contains(word) || told.contains("single quotes"), "{text}: {told}");
        }
        assert_eq!(words("q id=a#1 '$x'").unwrap(), ["q", "id=a#1", "$x"]);
    }
}
