//! `godwit recover`: who has the guest, after a migration whose end nobody knows, and how that is
//! settled.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use godwit_qemu::monitor::QmpError;
use godwit_qemu::{Known, LeftDestination, QemuError, Recovery};
use serde_json::json;

use crate::output::{self, json_line};
use crate::process::{FAILED, OPERATOR};
use crate::vm::{VmName, domain_wanted, libvirt_uri, refused_qemu};

/// Tell who has the guest after a migration whose end nobody knows, and settle it.
///
/// Run it on both sides, with the VM of each. Without --guest it changes nothing: it says what is
/// known here, and what to type. It needs no network: what the last godwit wrote down, and what
/// QEMU does, tell it. Exit codes: 0 nothing is to be done, or it was done; 1 it could not be; 3
/// you have to decide.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The VM of this side
    #[arg(long, value_name = "VM")]
    vm: VmName,

    /// Settle it: the guest is this side's and runs here, or the other side's, and this VM ends
    #[arg(long, value_name = "WHERE")]
    guest: Option<Where>,

    /// Even where what is known here says otherwise. Make sure before that the other VM has ended,
    /// or runs the guest
    #[arg(long, requires = "guest")]
    force: bool,

    /// Print the result as a line of JSON
    #[arg(long)]
    json: bool,
}

/// Where the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Where {
    /// On this side
    Here,
    /// On the other side
    There,
}

fn open(vm: &VmName) -> Result<Recovery, Box<dyn Error>> {
    match vm {
        VmName::Qemu(path) => Recovery::of_monitor(path).map_err(|error| refused_qemu(path, error)),
        VmName::Libvirt { domain, uri } => {
            domain_wanted(domain)?;
            Ok(Recovery::of_domain(domain, &libvirt_uri(uri.as_deref()))?)
        }
        VmName::Proxmox(id) => Ok(Recovery::of_proxmox(id)?),
        VmName::Microvm(_) => Err(format!(
            "{vm} keeps no record: ask both sides by godwit status --vm, and end the one that does \
             not run the guest"
        )
        .into()),
    }
}

/// What an operator types next.
fn next(vm: &VmName, known: Known) -> String {
    let settle = |place: &str| format!("godwit recover --vm {vm} --guest {place}");
    match known {
        Known::Runs => format!(
            "if the other side has it as well, which nothing but a --force can bring about, end \
             one of the two at once; if the other side is in doubt, type there: {}",
            "godwit recover --vm VM --guest there"
        ),
        Known::NeverCame => format!(
            "if the other side is in doubt, end this VM first, so that the guest can never come to \
             run here: {}\n\
             and then type there: godwit recover --vm VM --guest here",
            settle("there")
        ),
        Known::Stopped | Known::HandedOver => format!("run it: {}", settle("here")),
        Known::InDoubt => format!(
            "ask at the destination: godwit recover --vm VM\n  \
             the guest runs there, or is that side's: {}\n  \
             it never came, and that VM has ended:    {}",
            settle("there"),
            settle("here")
        ),
        Known::Leaves => format!(
            "ask at the destination: godwit recover --vm VM\n  \
             the guest runs there:                    the godwit migrate of this VM once more, \
             with the same --to and security, sends what is missing; do not end this VM\n  \
             it never came, and that VM has ended:    {}",
            settle("here")
        ),
        Known::Follows => format!(
            "ask at the destination: godwit recover --vm VM\n  \
             memory of it is missing there:           the godwit migrate of this VM once more, \
             with the same --to and security, sends it; do not end this VM\n  \
             it runs, and nothing is missing:         {} --force\n  \
             that VM has ended, and the guest is lost: the same",
            settle("there")
        ),
        Known::Lacks => {
            "fetch what is missing: type the godwit receive of this VM once more, with \
                         the same --listen and security, and at the source its godwit migrate"
                .to_owned()
        }
        Known::Silent => format!(
            "if it was stopped by somebody else, nothing is to be done here; if you know that it \
             runs nowhere else and never will: {} --force",
            settle("here")
        ),
    }
}

/// Whether there is no VM any more.
fn is_gone(error: &QemuError) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error, QemuError::Qmp(QmpError::Connect { source, .. })
        if matches!(source.kind(), ConnectionRefused | NotFound))
}

/// Tells of a VM that has ended.
fn tell_gone(arguments: &Arguments) -> ExitCode {
    let vm = &arguments.vm;
    let next = "if the other side is in doubt, and this is not only a wrong name, type there: \
                godwit recover --vm VM --guest here";
    if arguments.json {
        let vm = vm.to_string();
        json_line(&json!({ "vm": vm, "known": "gone", "unsettled": false, "next": next }));
    } else {
        println!("there is no VM at {vm}: no guest can come to run here\n{next}");
    }
    ExitCode::SUCCESS
}

/// What is known of a QEMU whose monitor does not answer, since it waits for a page itself.
fn look_at_silent(arguments: &Arguments, error: &(dyn Error + 'static)) -> Option<ExitCode> {
    let VmName::Qemu(path) = &arguments.vm else { return None };
    let is_silent = error.downcast_ref().is_some_and(|error: &QemuError| {
        matches!(error, QemuError::Qmp(QmpError::Timeout { .. } | QmpError::NoGreeting { .. }))
    });
    if !is_silent {
        return None;
    }
    let pid = LeftDestination::pid_of(path)?;
    Some(tell(arguments, Known::Lacks, pid, "silent"))
}

fn look(arguments: &Arguments, recovery: &Recovery) -> ExitCode {
    tell(arguments, recovery.known(), recovery.pid(), recovery.state())
}

fn tell(arguments: &Arguments, known: Known, pid: i32, state: &str) -> ExitCode {
    let vm = &arguments.vm;
    if arguments.json {
        json_line(&json!({
            "vm": vm.to_string(),
            "pid": pid,
            "state": state,
            "known": known.word(),
            "unsettled": known.is_unsettled(),
            "next": next(vm, known),
        }));
    } else {
        println!("{vm} is {state}: {}", known.words());
        println!("{}", next(vm, known));
    }
    if known.is_unsettled() { ExitCode::from(OPERATOR) } else { ExitCode::SUCCESS }
}

fn settle(arguments: &Arguments, guest: Where) -> Result<(), Box<dyn Error>> {
    let recovery = open(&arguments.vm)?;
    let (guest, done, remark) = match guest {
        Where::Here => {
            let remark = recovery.run_here(arguments.force)?;
            ("here", remark.unwrap_or("the guest is here, and QEMU as it was"), remark)
        }
        Where::There => {
            recovery.end_here(arguments.force)?;
            ("there", "this VM has ended: the guest is the other side's", None)
        }
    };
    if arguments.json {
        let vm = arguments.vm.to_string();
        json_line(&json!({ "vm": vm, "outcome": "settled", "guest": guest, "remark": remark }));
    } else {
        println!("{}: {done}", arguments.vm);
    }
    Ok(())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let done = match arguments.guest {
        Some(guest) => settle(arguments, guest).map(|()| ExitCode::SUCCESS),
        None => match open(&arguments.vm) {
            Err(error) if error.downcast_ref().is_some_and(is_gone) => Ok(tell_gone(arguments)),
            Err(error) => look_at_silent(arguments, &*error).ok_or(error),
            Ok(recovery) => Ok(look(arguments, &recovery)),
        },
    };
    done.unwrap_or_else(|error| {
        output::refusal(&*error, arguments.json);
        ExitCode::from(FAILED)
    })
}
