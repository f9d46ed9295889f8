//! `godwit keys`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use godwit_tls::{Made, make};
use serde_json::json;

use crate::output::{self, json_line};
use crate::process::FAILED;

/// Make keys for hosts, so that what goes between them is encrypted and each knows the other.
///
/// Run it once, at a place that you trust: it makes an authority in DIR, and for each HOST a
/// directory with the host's certificate and private key. Copy each one to its host, as
/// /etc/godwit/keys. The authority's own key (ca-key.pem) stays where it is: whoever has it can
/// pass for any host. More hosts can be added later.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The hosts, by the names or numbers that --to will be given
    #[arg(required = true, value_name = "HOST")]
    hosts: Vec<String>,

    /// Where to make them
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,

    /// How many days a host's certificate is valid
    #[arg(long, value_name = "N", default_value_t = 365,
        value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,

    /// Print the result as a line of JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match make(&arguments.dir, &arguments.hosts, arguments.days) {
        Ok(made) => {
            tell(&made, &arguments.dir, arguments.json);
            ExitCode::SUCCESS
        }
        Err(error) => {
            output::refusal(&error, arguments.json);
            ExitCode::from(FAILED)
        }
    }
}

fn tell(made: &Made, dir: &Path, json: bool) {
    if json {
        json_line(&json!({ "authority": made.authority, "hosts": made.hosts }));
        return;
    }
    if made.authority.is_some() {
        println!("made an authority in {}: keep ca-key.pem to yourself", dir.display());
    }
    for host in &made.hosts {
        let name = host.file_name().unwrap_or_default().display();
        println!("{}: copy it to {name}, as /etc/godwit/keys", host.display());
    }
}
