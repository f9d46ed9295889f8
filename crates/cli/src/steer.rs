//! `godwit status`, `set`, `switchover` and `cancel`: looking at a migration that runs, and
//! changing it; and the socket at which `godwit migrate` and `godwit upgrade` can be asked.
//!
//! The socket speaks the same lines as a microvm's control socket. For a microvm, whose engine is
//! elsewhere, it only passes them on.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_control::asked::Asked;
use godwit_control::messages::{Answer, MigrationLook, Request};
use godwit_control::steer::{Socket, steer};
use godwit_control::watch::Watched;
use godwit_control::{ControlError, client};
use godwit_engine::address::Address;
use godwit_engine::handle::MigrationHandle;
use godwit_qemu::monitor::Qmp;
use godwit_qemu::{Known, known_of};
use godwit_units::{TypedRate, format_duration};
use serde_json::{Value, json};

use crate::layout;
use crate::output::{self, Display, json_line};
use crate::process::FAILED;
use crate::run_directory::{self, CONTROL};
use crate::say;
use crate::settings::{self, Assignment};
use crate::vm::{VmName, domain_wanted, libvirt_uri, refused_qemu};

/// Requests are short, and so are those who make them.
const LONGEST_REQUEST: u64 = 64 << 10;
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// How often `--watch` looks.
const LOOK: Duration = Duration::from_millis(200);
/// So many looks that find nothing in a row are its end. One may meet a socket that is busy with
/// somebody else.
const MISSES: u32 = 5;

/// Which migration.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// The migration: the name it was given with --name, the path of its socket, or microvm:PATH
    /// [default: the only one that runs]
    #[arg(long, value_name = "NAME")]
    migration: Option<String>,
}

/// Show migrations that run: progress, estimates and settings.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    #[command(flatten)]
    which: Which,
    /// Instead, what a VM does: running, paused, inmigrate and so on; for one that is in doubt
    #[arg(long, value_name = "VM", conflicts_with = "migration")]
    vm: Option<VmName>,
    /// Go on until the migration ends, with the lines that `godwit migrate` itself shows
    #[arg(long, conflicts_with = "vm")]
    watch: bool,
    /// Print JSON; with --watch, a line for each look
    #[arg(long)]
    json: bool,
}

/// Change settings of a migration that runs; all or none of them.
#[derive(Debug, Args)]
#[command(after_help = settings::help())]
pub(crate) struct SetArguments {
    #[command(flatten)]
    which: Which,
    /// What to set, such as downtime-limit=100ms, max-bandwidth=1Gbit or throttle=off
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = Assignment,
        hide_possible_values = true)]
    settings: Vec<(String, String)>,
}

/// Make the connections of a migration by another way when they are lost, from the next attempt on.
#[derive(Debug, Args)]
pub(crate) struct RedirectArguments {
    #[command(flatten)]
    which: Which,
    /// Another address of the same destination; one beyond this host only if the migration has
    /// left it already
    #[arg(long, value_name = "ADDRESS", required_unless_present = "channels")]
    to: Option<Address>,
    /// Another number of connections for memory, 1 to 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    channels: Option<u8>,
}

/// End the copying of a migration that runs and switch over now.
#[derive(Debug, Args)]
pub(crate) struct SwitchoverArguments {
    #[command(flatten)]
    which: Which,
    /// Even if the expected downtime is above the limit
    #[arg(long)]
    force: bool,
    /// Whatever is left: it follows when the guest runs at the destination, which asks for what it
    /// needs. The guest is lost if this host ends before all has come
    #[arg(long, conflicts_with = "force")]
    postcopy: bool,
}

/// Cancel a migration that runs: the guest stays where it is.
#[derive(Debug, Args)]
pub(crate) struct CancelArguments {
    #[command(flatten)]
    which: Which,
}

/// What the machine says of itself, in QEMU's words for a QEMU, and what is known of its guest.
fn state_of(vm: &VmName) -> Result<(String, Option<Known>), Box<dyn std::error::Error>> {
    let alone = |state| Ok((state, None));
    match vm {
        VmName::Microvm(path) => alone(client::status(path)?.state),
        VmName::Libvirt { domain, uri } => {
            domain_wanted(domain)?;
            alone(godwit_qemu::domain_state(domain, &libvirt_uri(uri.as_deref()))?)
        }
        VmName::Proxmox(id) => alone(godwit_qemu::proxmox_state(id)?),
        VmName::Qemu(path) => {
            let asked = Qmp::connect(path).and_then(|mut qmp| {
                Ok((qmp.execute("query-status", Value::Null)?, qmp.peer_pid()?))
            });
            let (answer, pid) = asked.map_err(|error| refused_qemu(path, error.into()))?;
            let state = answer["status"].as_str().unwrap_or("in no state that it tells");
            let known = known_of(pid.as_raw_nonzero().get(), state);
            Ok((state.to_owned(), Some(known)))
        }
    }
}

pub(crate) fn status(arguments: &StatusArguments) -> ExitCode {
    if let Some(vm) = &arguments.vm {
        return match state_of(vm) {
            Ok((state, known)) if arguments.json => {
                let known = known.map(Known::word);
                json_line(&json!({ "vm": vm.to_string(), "state": state, "known": known }));
                ExitCode::SUCCESS
            }
            Ok((state, known)) => {
                match known.filter(|known| known.is_unsettled()) {
                    Some(known) => println!(
                        "{vm} is {}: {} (godwit recover --vm {vm} tells what to do)",
                        say::line(state),
                        known.words()
                    ),
                    None => println!("{vm} is {}", say::line(state)),
                }
                ExitCode::SUCCESS
            }
            Err(error) => failed(&error.to_string()),
        };
    }
    if arguments.watch {
        return watch(&arguments.which, arguments.json);
    }
    let found = match &arguments.which.migration {
        Some(name) => match socket_of(name) {
            Ok(socket) => Found { sockets: vec![socket], closed: Vec::new() },
            Err(why) => return failed(&why),
        },
        None => running(),
    };
    let mut all = Vec::new();
    let width = layout::width(&std::io::stdout());
    for socket in &found.sockets {
        let look = match client::migration(socket) {
            Ok(look) => look,
            // One of several that has ended since it was listed.
            Err(_) if arguments.which.migration.is_none() => continue,
            Err(error) => return refused(&error),
        };
        let name = name_of(socket);
        if arguments.json {
            let settings: serde_json::Map<String, Value> =
                look.settings.into_iter().map(|(key, value)| (key, value.into())).collect();
            all.push(json!({
                "migration": name,
                "vm": look.vm,
                "to": look.to,
                "progress": look.progress,
                "settings": settings,
            }));
        } else {
            show(&name, &look, width);
            all.push(Value::Null);
        }
    }
    if arguments.json {
        let closed: Vec<String> =
            found.closed.iter().map(|path| path.display().to_string()).collect();
        json_line(&json!({ "migrations": all, "not_visible": closed }));
    } else if all.is_empty() {
        println!("{}", layout::wrap("", &nothing_runs(&found.closed), 0, width));
    } else if !found.closed.is_empty() {
        println!("{}", layout::wrap("", &not_visible(&found.closed), 0, width));
    }
    ExitCode::SUCCESS
}

/// Shows a migration until it ends, as who began it sees it. Neither to look at it nor to end the
/// look changes it.
fn watch(which: &Which, json: bool) -> ExitCode {
    let socket = match the_one(which) {
        Ok(socket) => socket,
        Err(why) => return failed(&why),
    };
    let name = name_of(&socket);
    let mut display = Display::new(json);
    let (mut seen, mut shown, mut missed) = (false, None, 0);
    loop {
        match client::migration(&socket) {
            Ok(look) => {
                if !seen && !json {
                    let width = layout::width(&std::io::stderr());
                    eprintln!("{}", layout::wrap("", &heading(&name, &look), 2, width));
                }
                (seen, missed) = (true, 0);
                if look.progress.is_some() && look.progress != shown {
                    shown = look.progress;
                    shown.iter().for_each(|progress| display.progress(progress));
                }
            }
            Err(_) if seen && missed + 1 == MISSES => break,
            Err(_) if seen => missed += 1,
            Err(error) => return refused(&error),
        }
        std::thread::sleep(LOOK);
    }
    display.finish();
    if json {
        json_line(&json!({ "event": "ended", "migration": name }));
    } else {
        let words = "it has ended; who began it is told how, and godwit report what it was like";
        eprintln!("migration {name}: {words}");
    }
    ExitCode::SUCCESS
}

/// That there is nothing to show, and where something may be hidden.
fn nothing_runs(closed: &[PathBuf]) -> String {
    if closed.is_empty() {
        return "no migration runs".to_owned();
    }
    format!("no migration runs that you can see; {}", not_visible(closed))
}

fn not_visible(closed: &[PathBuf]) -> String {
    let closed: Vec<String> = closed.iter().map(|path| path.display().to_string()).collect();
    format!(
        "those of other users are not visible to you ({}): ask as root or as the user who runs \
         them",
        closed.join(", ")
    )
}

/// The migration and its machines, as a heading.
fn heading(name: &str, look: &MigrationLook) -> String {
    let vm = look.vm.as_ref().map(|vm| format!(" of {vm}")).unwrap_or_default();
    let to = look.to.as_ref().map(|to| format!(" to {to}")).unwrap_or_default();
    format!("migration {name}{vm}{to}")
}

fn show(name: &str, look: &MigrationLook, width: usize) {
    println!("{}", layout::wrap("", &heading(name, look), 2, width));
    match &look.progress {
        Some(progress) => print!("{}", output::status_text(progress, width)),
        None => println!("  setting up"),
    }
    println!("  settings");
    for (key, value) in &look.settings {
        println!("    {:<20} {}", say::line(key), say::line(beside(value)));
    }
}

/// A rate with the same in the other unit beside it; anything else as it is.
fn beside(value: &str) -> String {
    value.parse::<TypedRate>().map_or_else(|_| value.to_owned(), TypedRate::both)
}

pub(crate) fn set(arguments: &SetArguments) -> ExitCode {
    ask(&arguments.which, &Request::Set { settings: arguments.settings.clone() }, |look| {
        let mut told: Vec<String> = Vec::new();
        for (key, _) in &arguments.settings {
            let value = look.settings.iter().find(|(known, _)| known == key);
            let line =
                format!("{key}={}", value.map_or_else(String::new, |(_, value)| beside(value)));
            if !told.contains(&line) {
                told.push(line);
            }
        }
        format!("now {}", told.join(", "))
    })
}

pub(crate) fn redirect(arguments: &RedirectArguments) -> ExitCode {
    let RedirectArguments { which, to, channels } = arguments;
    let request =
        Request::Redirect { to: to.as_ref().map(Address::to_string), channels: *channels };
    ask(which, &request, |look| {
        let to = to.as_ref().map(|to| format!("to {to}"));
        let channels = channels.map(|count| format!("with {count} connections for memory"));
        let way: Vec<String> = [to, channels].into_iter().flatten().collect();
        let severed = look.progress.as_ref().is_some_and(|progress| progress.severed.is_some());
        let when = if severed { "from now on" } else { "when they are lost" };
        format!("its connections are made {}, {when}", way.join(" "))
    })
}

pub(crate) fn switchover(arguments: &SwitchoverArguments) -> ExitCode {
    let request = Request::SwitchOver { force: arguments.force, post_copy: arguments.postcopy };
    ask(&arguments.which, &request, |look| {
        if arguments.postcopy {
            let left = look.progress.as_ref().map(|progress| progress.remaining);
            let left = left.map_or_else(|| "what is left".to_owned(), |left| left.to_string());
            return format!("it switches over now; {left} may follow when the guest runs there");
        }
        let expected = look.progress.as_ref().and_then(|progress| progress.expected_downtime);
        let expected =
            expected.map(format_duration).unwrap_or_else(|| "a downtime not known yet".to_owned());
        format!("it switches over now; expected downtime: {expected}")
    })
}

pub(crate) fn cancel(arguments: &CancelArguments) -> ExitCode {
    ask(&arguments.which, &Request::Cancel, |_| {
        "it is being cancelled; the guest stays where it is, and who began the migration is told \
         when all is undone"
            .to_owned()
    })
}

/// The socket of the migration that is meant, or why there is none.
fn the_one(which: &Which) -> Result<PathBuf, String> {
    if let Some(name) = &which.migration {
        return socket_of(name);
    }
    let Found { sockets, closed } = running();
    match sockets.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(nothing_runs(&closed)),
        several => {
            let names: Vec<String> = several.iter().map(|socket| name_of(socket)).collect();
            let names = names.join("|");
            Err(format!("several migrations run: choose one with --migration {names}"))
        }
    }
}

/// Asks for `request`, and when it was granted tells what `granted` makes of the migration as it
/// was just before (which may have ended by the time somebody could ask again) or, for a change of
/// settings, as it is now.
fn ask(which: &Which, request: &Request, granted: impl Fn(&MigrationLook) -> String) -> ExitCode {
    let socket = match the_one(which) {
        Ok(socket) => socket,
        Err(why) => return failed(&why),
    };
    let before = client::migration(&socket);
    if let Err(error) = client::command(&socket, request) {
        return refused(&error);
    }
    let look = match request {
        Request::Set { .. } => client::migration(&socket).or(before),
        _ => before,
    };
    if let Ok(look) = look {
        let text = format!("{}: {}", heading(&name_of(&socket), &look), granted(&look));
        println!("{}", layout::wrap("", &text, 2, layout::width(&std::io::stdout())));
    }
    ExitCode::SUCCESS
}

fn refused(error: &ControlError) -> ExitCode {
    failed(&error.to_string())
}

fn failed(why: &str) -> ExitCode {
    eprintln!("godwit: {}", say::line(why));
    ExitCode::from(FAILED)
}

/// Where the sockets of this user's migrations are: of root's for all the host, of others' for
/// themselves.
fn directory() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) if !user.is_root() => Path::new(&path).join("godwit"),
        _ if user.is_root() => ROOTS.into(),
        _ => format!("/tmp/godwit-{}", user.as_raw()).into(),
    }
}

/// Where root's are.
const ROOTS: &str = "/run/godwit";

/// All places where anyone's may be; this user's own first.
fn directories() -> Vec<PathBuf> {
    let below = |parent: &str| std::fs::read_dir(parent).into_iter().flatten().flatten();
    let users = below("/run/user").map(|entry| entry.path().join("godwit"));
    let others =
        below("/tmp").map(|entry| entry.path()).filter(|path| owner_in_name(path).is_some());
    let mut others: Vec<PathBuf> =
        std::iter::once(ROOTS.into()).chain(users).chain(others).collect();
    others.sort();
    others.retain(|path| *path != directory());
    std::iter::once(directory()).chain(others).collect()
}

/// The user id in `/tmp/godwit-UID`.
fn owner_in_name(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix("godwit-")?.parse().ok()
}

/// The socket of the migration `name`, or why there is none.
fn socket_of(name: &str) -> Result<PathBuf, String> {
    if let Some(path) = name.strip_prefix("microvm:") {
        return Ok(path.into());
    }
    if name.contains('/') {
        return Ok(name.into());
    }
    let file = format!("{name}.sock");
    let Found { sockets, closed } = running();
    let known = sockets.iter().find(|socket| socket.file_name() == Some(file.as_ref()));
    known.cloned().ok_or_else(|| match sockets.as_slice() {
        [] => nothing_runs(&closed),
        others => {
            let names: Vec<String> = others.iter().map(|socket| name_of(socket)).collect();
            format!("no migration '{name}' runs: choose one with --migration {}", names.join("|"))
        }
    })
}

/// What the migration at `socket` is called.
pub(crate) fn name_of(socket: &Path) -> String {
    if socket.parent() == Some(&directory()) {
        socket.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    } else {
        socket.display().to_string()
    }
}

/// Migrations that run.
pub(crate) struct Found {
    /// The sockets of those that can be asked.
    pub(crate) sockets: Vec<PathBuf>,
    /// The directories of other users, which cannot be looked into.
    pub(crate) closed: Vec<PathBuf>,
}

/// All migrations that run on this host, as far as this user may know of them.
pub(crate) fn running() -> Found {
    let mut found = Found { sockets: Vec::new(), closed: Vec::new() };
    for directory in directories() {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                found.closed.push(directory);
                continue;
            }
            Err(_) => continue,
        };
        // In /tmp anyone can make a directory under another user's name, or a link to one.
        let meta = std::fs::symlink_metadata(&directory);
        let owner = meta.ok().filter(std::fs::Metadata::is_dir).map(|meta| meta.uid());
        if owner_in_name(&directory).is_some_and(|named| owner != Some(named)) {
            continue;
        }
        let mut sockets: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == CONTROL))
            .filter(|path| UnixStream::connect(path).is_ok())
            .collect();
        sockets.sort();
        found.sockets.append(&mut sockets);
    }
    found
}

/// Whom a migration's socket speaks for.
#[derive(Clone)]
pub(crate) struct Host {
    /// The machine, as it was named.
    pub(crate) vm: String,
    /// Where its guest goes.
    pub(crate) to: String,
    /// Where it is asked.
    pub(crate) engine: Engine,
    /// Those who watch it.
    pub(crate) watched: Watched,
}

/// Where the engine of a migration is.
#[derive(Clone)]
pub(crate) enum Engine {
    /// The engine in this process.
    Here(MigrationHandle),
    /// The same with both sides of it, for an upgrade.
    Both(MigrationHandle),
    /// That of the microvm behind this socket.
    Microvm(PathBuf),
}

/// Serves `host` at the socket for `name`, until the returned value is dropped.
///
/// # Errors
/// Why it cannot be; the migration can do without.
pub(crate) fn serve(name: &str, host: Host) -> Result<Socket, String> {
    let (listener, socket) =
        run_directory::listen(&directory(), (name, CONTROL), rustix::process::getuid().as_raw())?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // One after the other: requests are answered at once, and who does not ask is not
            // waited for long.
            let _ = stream.set_read_timeout(Some(REQUEST_LIMIT));
            let _ = stream.set_write_timeout(Some(REQUEST_LIMIT));
            let mut text = String::new();
            if !matches!(
                BufReader::new((&stream).take(LONGEST_REQUEST)).read_line(&mut text),
                Ok(1..)
            ) {
                continue;
            }
            let answer = match Asked::read(text.as_bytes()) {
                Ok(asked) if asked.request == Request::Watch => match host.watched.tell(&stream) {
                    Ok(()) => continue,
                    Err(error) => Answer::Refused { error },
                },
                Ok(asked) => asked.answered(host.answer(&asked.request)),
                Err(error) => Answer::Refused { error },
            };
            if let Ok(mut line) = serde_json::to_string(&answer) {
                line.push('\n');
                let _ = (&stream).write_all(line.as_bytes());
            }
        }
    });
    Ok(socket)
}

impl Host {
    /// Does what `request` wants of the migration.
    pub(crate) fn answer(&self, request: &Request) -> Answer {
        let answer = match &self.engine {
            Engine::Here(handle) => steer(handle, request),
            Engine::Both(handle) => match not_for_both(request) {
                Some(why) => Answer::Refused { error: why.to_owned() },
                None => steer(handle, request),
            },
            Engine::Microvm(path) => client::ask(path, request)
                .unwrap_or_else(|error| Answer::Refused { error: error.to_string() }),
        };
        match answer {
            Answer::Migration(look) => Answer::Migration(MigrationLook {
                vm: Some(self.vm.clone()),
                to: Some(self.to.clone()),
                ..look
            }),
            answer => answer,
        }
    }
}

/// Why `request` makes no sense where one process has both sides, if it does not.
fn not_for_both(request: &Request) -> Option<&'static str> {
    match request {
        Request::Redirect { .. } => Some(
            "an upgrade has no connections but within its process: there is no other way for them",
        ),
        Request::SwitchOver { post_copy: true, .. } => {
            Some("an upgrade has no post-copy: the guest leaves the old QEMU when all is copied")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_users_run_is_not_denied() {
        assert_eq!(nothing_runs(&[]), "no migration runs");
        let hidden = nothing_runs(&["/run/godwit".into()]);
        assert_eq!(
            hidden,
            "no migration runs that you can see; those of other users are not visible to you \
             (/run/godwit): ask as root or as the user who runs them"
        );
    }

    #[test]
    fn rates_have_the_other_unit_beside_them() {
        assert_eq!(beside("40Mbit"), "40Mbit (4.77MiB/s)");
        assert_eq!(beside("300ms"), "300ms");
        assert_eq!(beside("99"), "99");
    }
}
