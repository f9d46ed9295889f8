//! `godwit status`, `set`, `switchover` and `cancel`: looking at a migration that runs, and changing it; and the socket at
//! which `godwit migrate` can be asked.
//!
//! The socket speaks the same lines as a microvm's control socket. For a microvm, whose engine is elsewhere, it only
//! passes them on.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_engine::report::Progress;
use godwit_engine::steering::Steering;
use godwit_microvm::MicrovmError;
use godwit_microvm::control::client;
use godwit_microvm::control::messages::{Answer, Request};
use godwit_microvm::control::steer::{Socket, steer};
use serde_json::{Value, json};

use crate::output::{self, json_line};
use crate::process::FAILED;
use crate::run_directory;

/// Requests are short, and so are those who make them.
const LONGEST_REQUEST: u64 = 64 << 10;
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Which migration.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// The migration: the name it was given with --name, the path of its socket, or microvm:PATH [default: the only one
    /// that runs]
    #[arg(long, value_name = "NAME")]
    migration: Option<String>,
}

/// Show migrations that run: progress, estimates and settings.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    #[command(flatten)]
    which: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Change settings of a migration that runs; all or none of them.
#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    #[command(flatten)]
    which: Which,
    /// What to set, such as downtime-limit=100ms, max-bandwidth=1Gbit or throttle=off; `godwit status` lists them all
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = assignment)]
    settings: Vec<(String, String)>,
}

/// End the copying of a migration that runs and switch over now.
#[derive(Debug, Args)]
pub(crate) struct SwitchoverArguments {
    #[command(flatten)]
    which: Which,
    /// Even if the expected downtime is above the limit
    #[arg(long)]
    force: bool,
}

/// Cancel a migration that runs: the guest stays where it is.
#[derive(Debug, Args)]
pub(crate) struct CancelArguments {
    #[command(flatten)]
    which: Which,
}

/// A `key=value`.
pub(crate) fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) => Ok((key.trim().to_owned(), value.trim().to_owned())),
        None => Err("write it as key=value, such as downtime-limit=300ms".to_owned()),
    }
}

pub(crate) fn status(arguments: &StatusArguments) -> ExitCode {
    let sockets = match &arguments.which.migration {
        Some(name) => vec![socket_of(name)],
        None => running(),
    };
    if sockets.is_empty() {
        if arguments.json {
            json_line(&json!({ "migrations": [] }));
        } else {
            println!("no migration runs");
        }
        return ExitCode::SUCCESS;
    }
    let mut all = Vec::new();
    for socket in sockets {
        let (progress, settings) = match client::migration(&socket) {
            Ok(answer) => answer,
            // One of several that has ended since it was listed.
            Err(_) if arguments.which.migration.is_none() => continue,
            Err(error) => return refused(&error),
        };
        let name = name_of(&socket);
        if arguments.json {
            let settings: serde_json::Map<String, Value> =
                settings.into_iter().map(|(key, value)| (key, value.into())).collect();
            all.push(json!({ "migration": name, "progress": progress, "settings": settings }));
        } else {
            show(&name, progress.as_deref(), &settings);
        }
    }
    if arguments.json {
        json_line(&json!({ "migrations": all }));
    }
    ExitCode::SUCCESS
}

fn show(name: &str, progress: Option<&Progress>, settings: &[(String, String)]) {
    println!("migration {name}");
    match progress {
        Some(progress) => println!("  {}", output::progress_line(progress)),
        None => println!("  setting up"),
    }
    for line in progress.map(output::remarks).unwrap_or_default() {
        println!("  {line}");
    }
    for (key, value) in settings {
        println!("  {key:<20} {value}");
    }
}

pub(crate) fn set(arguments: &SetArguments) -> ExitCode {
    ask(&arguments.which, &Request::Set { settings: arguments.settings.clone() })
}

pub(crate) fn switchover(arguments: &SwitchoverArguments) -> ExitCode {
    ask(&arguments.which, &Request::SwitchOver { force: arguments.force })
}

pub(crate) fn cancel(arguments: &CancelArguments) -> ExitCode {
    ask(&arguments.which, &Request::Cancel)
}

fn ask(which: &Which, request: &Request) -> ExitCode {
    let socket = match &which.migration {
        Some(name) => socket_of(name),
        None => match running().as_slice() {
            [only] => only.clone(),
            [] => {
                eprintln!("godwit: no migration runs");
                return ExitCode::from(FAILED);
            }
            several => {
                let names: Vec<String> = several.iter().map(|socket| name_of(socket)).collect();
                eprintln!("godwit: several migrations run: choose one with --migration {}", names.join("|"));
                return ExitCode::from(FAILED);
            }
        },
    };
    match client::command(&socket, request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refused(&error),
    }
}

fn refused(error: &MicrovmError) -> ExitCode {
    eprintln!("godwit: {error}");
    ExitCode::from(FAILED)
}

/// Where the sockets of migrations are: of root's for all the host, of others' for themselves.
fn directory() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) if !user.is_root() => Path::new(&path).join("godwit"),
        _ if user.is_root() => "/run/godwit".into(),
        _ => format!("/tmp/godwit-{}", user.as_raw()).into(),
    }
}

fn socket_of(name: &str) -> PathBuf {
    match name.strip_prefix("microvm:") {
        Some(path) => path.into(),
        None if name.contains('/') => name.into(),
        None => directory().join(format!("{name}.sock")),
    }
}

fn name_of(socket: &Path) -> String {
    if socket.parent() == Some(&directory()) {
        socket.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    } else {
        socket.display().to_string()
    }
}

/// The sockets of all migrations that run.
fn running() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory()).into_iter().flatten().flatten();
    let mut sockets: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        .filter(|path| UnixStream::connect(path).is_ok())
        .collect();
    sockets.sort();
    sockets
}

/// Whom a migration's socket speaks for.
pub(crate) enum Engine {
    /// The engine in this process.
    Here(Steering),
    /// That of the microvm behind this socket.
    Microvm(PathBuf),
}

/// Serves `engine` at the socket for `name`, until the returned value is dropped.
///
/// # Errors
/// Why it cannot be; the migration can do without.
pub(crate) fn serve(name: &str, engine: Engine) -> Result<Socket, String> {
    let (listener, socket) = run_directory::listen(&directory(), name, rustix::process::getuid().as_raw())?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // One after the other: requests are answered at once, and who does not ask is not waited for long.
            let _ = stream.set_read_timeout(Some(REQUEST_LIMIT));
            let _ = stream.set_write_timeout(Some(REQUEST_LIMIT));
            let mut text = String::new();
            if !matches!(BufReader::new((&stream).take(LONGEST_REQUEST)).read_line(&mut text), Ok(1..)) {
                continue;
            }
            let answer = match serde_json::from_str(&text) {
                Ok(request) => engine.answer(&request),
                Err(error) => Answer::Refused { error: format!("not understood: {error}") },
            };
            if let Ok(mut line) = serde_json::to_string(&answer) {
                line.push('\n');
                let _ = (&stream).write_all(line.as_bytes());
            }
        }
    });
    Ok(socket)
}

impl Engine {
    fn answer(&self, request: &Request) -> Answer {
        match self {
            Self::Here(steering) => steer(steering, request),
            Self::Microvm(path) => client::ask(path, request)
                .unwrap_or_else(|error| Answer::Refused { error: error.to_string() }),
        }
    }
}
