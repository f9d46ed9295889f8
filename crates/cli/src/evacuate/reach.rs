//! The host that is emptied: this one, or one that is reached by a command (`--on`), where a godwit
//! moves the VMs for the coordinator here.
//!
//! Invariant: a plan goes on with the host that it was made for, and with the files of its own
//! moves there.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use godwit_evacuate::{
    Files, Hands, Home, Host, ListedVm, Moves, Plan, RemoteHands, serve_hands, this_host,
};
use godwit_qemu::run_directory;

use super::from::From;
use super::{Arguments, directory, evacuations, private};
use crate::run_directory::{HeldName, share_name};

/// What really moves the VMs, on this host or another.
pub(super) enum Reach {
    Here(Moves, Home),
    There(Box<RemoteHands>),
}

impl Reach {
    /// For one of several coordinators of a plan, whose host is `home` if that is known.
    pub(super) fn shared(arguments: &Arguments, home: Option<&Home>) -> anyhow::Result<Self> {
        if let Some(command) = arguments.shared.on() {
            return there(command, arguments, home.map_or(Files::OfName, Files::Known));
        }
        let here = this_host();
        if let Some(home) = home.filter(|home| home.host != here) {
            bail!("the plan is of the host {}, and this is {here}: {ON}", home.host);
        }
        let own = directory(arguments)?.join("moves");
        let directory = home.map_or(own, |home| home.directory.clone());
        Ok(Self::Here(moves(&arguments.name, &directory)?, Home { host: here, directory }))
    }

    /// For the only coordinator of a new plan, or of `known`, which is kept at `place`.
    pub(super) fn alone(
        arguments: &Arguments,
        known: Option<&Plan>,
        place: &str,
    ) -> anyhow::Result<Self> {
        let home = known.and_then(|plan| plan.home.as_ref());
        match (arguments.shared.on(), home) {
            (Some(_), None) if known.is_some() => bail!(
                "the plan in {place} is of this host, where its moves are: go on without --on"
            ),
            (None, Some(home)) => {
                bail!("the plan in {place} is of the host {}, from elsewhere: {ON}", home.host)
            }
            (Some(command), home) => {
                there(command, arguments, home.map_or(Files::New, Files::Known))
            }
            (None, None) => Self::shared(arguments, None),
        }
    }

    pub(super) fn home(&self) -> Option<&Home> {
        match self {
            Self::Here(_, home) => Some(home),
            Self::There(hands) => hands.home(),
        }
    }

    pub(super) fn clear(&mut self) -> anyhow::Result<()> {
        let cleared = match self {
            Self::Here(moves, _) => moves.clear(),
            Self::There(hands) => hands.clear(),
        };
        cleared.map_err(anyhow::Error::msg)
    }

    pub(super) fn hands(&mut self) -> &mut dyn Hands {
        match self {
            Self::Here(moves, _) => moves,
            Self::There(hands) => hands.as_mut(),
        }
    }
}

/// What to do where the host is another one.
const ON: &str = "say by --on how godwit is run there, as in --on 'ssh HOST godwit'";

/// Hands on the host where `command` runs godwit.
fn there(command: &str, arguments: &Arguments, files: Files<'_>) -> anyhow::Result<Reach> {
    let hands = RemoteHands::reach(&words(command), &arguments.name, files);
    hands.map(Box::new).map(Reach::There).map_err(|why| in_vain(command, &why))
}

fn words(command: &str) -> Vec<String> {
    command.split_whitespace().map(str::to_owned).collect()
}

/// Why the host was not reached, or what it refused.
pub(super) fn in_vain(command: &str, why: &str) -> anyhow::Error {
    anyhow::anyhow!("--on '{command}': {why}")
}

/// The VMs that `from` keeps on the host that is emptied.
pub(super) fn vms(arguments: &Arguments, from: &From) -> anyhow::Result<Vec<ListedVm>> {
    let (only, except) = (&arguments.only, &arguments.except);
    match arguments.shared.on() {
        None => from.vms(only, except),
        Some(command) => RemoteHands::vms(&words(command), &from.to_string(), only, except)
            .map_err(|why| in_vain(command, &why)),
    }
}

/// The program by which godwit is run on the host that is emptied: the last word of the command.
pub(super) fn program(arguments: &Arguments) -> anyhow::Result<String> {
    if let Some(word) = arguments.shared.on().and_then(|command| command.split_whitespace().last())
    {
        return Ok(word.to_owned());
    }
    let godwit = own_program()?;
    Ok(godwit.to_str().context("this program's path is no text")?.to_owned())
}

fn own_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("this program cannot be found")
}

fn moves(name: &str, directory: &Path) -> anyhow::Result<Moves> {
    let place = || directory.display().to_string();
    private(directory).with_context(place)?;
    let godwit = own_program()?;
    let moves = Moves::new(directory, name, &godwit, &run_directory::path()).with_context(place)?;
    moves.check_alone().map_err(anyhow::Error::msg)?;
    Ok(moves)
}

/// This host, for a coordinator elsewhere.
struct ThisHost<'a> {
    arguments: &'a Arguments,
    held: Option<HeldName>,
}

impl ThisHost<'_> {
    fn opened(&mut self, name: &str, files: Option<&Path>) -> anyhow::Result<(Home, Moves)> {
        let name = super::name(name).map_err(anyhow::Error::msg)?;
        let files = files.unwrap_or(Path::new("moves"));
        let directory = evacuations(self.arguments)?.join(&name).join(files);
        let place = directory.display().to_string();
        self.held = Some(share_name(&run_directory::path(), &name, &place)?);
        let moves = moves(&name, &directory)?;
        Ok((Home { host: this_host(), directory }, moves))
    }
}

impl Host for ThisHost<'_> {
    fn open(&mut self, name: &str, files: Option<&Path>) -> Result<(Home, Moves), String> {
        self.opened(name, files).map_err(|error| format!("on the host {}: {error:#}", this_host()))
    }

    fn vms(
        &mut self,
        manager: &str,
        only: &[String],
        except: &[String],
    ) -> Result<Vec<ListedVm>, String> {
        let from: From = manager.parse()?;
        from.vms(only, except).map_err(|error| format!("on the host {}: {error:#}", this_host()))
    }
}

/// Moves VMs of this host for a coordinator elsewhere, which asks on standard input.
pub(super) fn serve(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut host = ThisHost { arguments, held: None };
    serve_hands(BufReader::new(std::io::stdin()), std::io::stdout(), &mut host)?;
    Ok(ExitCode::SUCCESS)
}
