//! An evacuation that several coordinators share: its plan is in a store that all of them reach.
//! One of them has the lease and acts, the others stand by.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use godwit_engine::Cancel;
use godwit_evacuate::{
    EvacuateError, Lease, NatsOptions, NatsStore, Plan, Runner, Store, Tenure, Wanted, Wishes,
    keys, this_host,
};
use godwit_qemu::run_directory;
use godwit_tls::{Files, Side};
use godwit_units::{Rate, parse_duration};
use serde_json::{Value, json};

use super::control::serve_beside;
use super::desk::{Desk, End, coordinate};
use super::reach::Reach;
use super::{Arguments, limits, tell};
use crate::layout;
use crate::output::json_line;
use crate::process::{self, CANCELLED};
use crate::run_directory::share_name;

/// Where several coordinators keep the plan.
#[derive(Debug, Args)]
pub(super) struct StoreArguments {
    /// Keep the plan in NATS JetStream, so that several coordinators may go on with it:
    /// nats://HOST:PORT, with commas between those of one cluster. The same command elsewhere
    /// stands by
    #[arg(long, value_name = "SERVERS", help_heading = "Several coordinators")]
    store: Option<String>,

    /// Encrypt what the store is told, with this host's keys in DIR, as `godwit keys` makes them;
    /// the server must show a certificate of the same authority
    #[arg(long, value_name = "DIR", requires = "store", help_heading = "Several coordinators")]
    store_keys: Option<PathBuf>,

    /// Show the store the credentials in FILE, as `nsc` makes them
    #[arg(long, value_name = "FILE", requires = "store", help_heading = "Several coordinators")]
    store_credentials: Option<PathBuf>,

    /// Without keys, use a store beyond this host all the same: whoever is on the way can read and
    /// change the plan, and with it the commands that are run
    #[arg(long, requires = "store", conflicts_with = "store_keys")]
    #[arg(help_heading = "Several coordinators")]
    store_insecure: bool,

    /// Copies of the plan in a cluster of servers, when it is made
    #[arg(long, value_name = "N", requires = "store", default_value = "1",
          value_parser = clap::value_parser!(u8).range(1..=5),
          help_heading = "Several coordinators")]
    store_replicas: u8,

    /// A coordinator that is not heard of for so long counts as gone
    #[arg(long, value_name = "TIME", requires = "store", default_value = "5s",
          value_parser = silence, help_heading = "Several coordinators")]
    take_over_after: Duration,

    /// The command by which godwit is run on the host that is emptied, if that is not this one, as
    /// in 'ssh east godwit'; commands that take guests in are run there, too
    #[arg(long, value_name = "COMMAND")]
    on: Option<String>,

    /// Move VMs for a coordinator on another host; it starts this by itself
    // Alone, so that no list is needed; `list` cannot name what is hidden, of which completions
    // know nothing.
    #[arg(long, hide = true, exclusive = true)]
    hands: bool,
}

impl StoreArguments {
    /// Whether there may be several coordinators.
    pub(super) fn is_shared(&self) -> bool {
        self.store.is_some()
    }

    /// The command that runs godwit on the host that is emptied, if that is not this one.
    pub(super) fn on(&self) -> Option<&str> {
        self.on.as_deref()
    }

    /// Whether this is to move VMs for another.
    pub(super) fn is_hands(&self) -> bool {
        self.hands
    }
}

fn silence(text: &str) -> Result<Duration, String> {
    let silence = parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(500)..=Duration::from_secs(600)).contains(&silence) {
        Ok(silence)
    } else {
        Err("write a time from 500ms to 10min".to_owned())
    }
}

/// The host of a server's address, and whether what it is told is encrypted.
fn server(text: &str) -> Result<(String, bool), String> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
    if !matches!(scheme, "nats" | "tls") {
        return Err(format!("--store {text}: write nats://HOST:PORT or tls://HOST:PORT"));
    }
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place).trim_end_matches('/');
    let host = match place.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => place.split(':').next().unwrap_or_default(),
    };
    if host.is_empty() {
        return Err(format!("--store {text}: there is no host in it"));
    }
    Ok((host.to_owned(), scheme == "tls"))
}

fn is_this_host(host: &str) -> bool {
    let loopback = |address: std::net::IpAddr| address.is_loopback();
    host == "localhost" || host.parse().is_ok_and(loopback)
}

/// The store that is meant; whether a place for the plan is made in it.
fn connect(arguments: &Arguments, make: bool) -> anyhow::Result<NatsStore> {
    let of = &arguments.shared;
    let servers = of.store.as_deref().unwrap_or_default();
    for text in servers.split(',') {
        let (host, encrypted) = server(text.trim()).map_err(anyhow::Error::msg)?;
        if !encrypted && of.store_keys.is_none() && !of.store_insecure && !is_this_host(&host) {
            bail!(
                "--store {text}: beyond this host the plan would go unencrypted: name this host's \
                 keys by --store-keys DIR, or say --store-insecure"
            );
        }
    }
    let keys = of.store_keys.as_deref().map(|dir| Files::in_dir(dir, Side::Source)).transpose();
    let keys = keys.context("--store-keys")?;
    let store = NatsStore::connect(&NatsOptions {
        credentials: of.store_credentials.clone(),
        keys: keys.map(|files| (files.authority, files.certificate, files.key)),
        make,
        replicas: usize::from(of.store_replicas),
        silence: of.take_over_after,
        who: format!("{}, process {}", this_host(), std::process::id()),
        ..NatsOptions::of(servers, &arguments.name)
    })?;
    Ok(store)
}

pub(super) fn read_plan(store: &impl Store) -> anyhow::Result<Option<Plan>> {
    let plan = store.read(keys::PLAN)?;
    plan.map(|plan| serde_json::from_slice(&plan).context("the plan in the store")).transpose()
}

/// What became of the evacuation, if it is over.
fn outcome(store: &impl Store) -> Result<Option<Value>, EvacuateError> {
    let outcome = store.read(keys::OUTCOME)?.unwrap_or_default();
    Ok(serde_json::from_slice(&outcome).ok())
}

/// Says once what it waits for, and again when that is something else.
struct Teller {
    json: bool,
    last: String,
}

impl Teller {
    fn say(&mut self, event: &str, text: &str) {
        let whole = format!("{event}{text}");
        if self.last == whole {
            return;
        }
        self.last = whole;
        tell::note(event, text, self.json);
    }
}

/// Coordinates, or stands by, until the evacuation is over.
pub(super) fn evacuate(arguments: &Arguments, plan: Option<Plan>) -> anyhow::Result<ExitCode> {
    let mut store = connect(arguments, plan.is_some())?;
    let place = format!("{} '{}'", store.place(), arguments.name);
    let there = read_plan(&store)?;
    let ended = outcome(&store)?;
    match (&plan, &there) {
        (None, None) => return Err(EvacuateError::NoPlan { place }.into()),
        (Some(new), Some(old)) if ended.is_some() || !old.is_same_as(new) => {
            return Err(EvacuateError::Planned { place }.into());
        }
        _ => {}
    }
    let home = there.as_ref().and_then(|plan| plan.home.clone());
    // Ctrl-C ends the wait for a host that does not answer.
    let mut reach = Reach::shared(arguments, home.as_ref())?;
    let cancel = process::cancel_on_signals();
    let mut teller = Teller { json: arguments.json, last: String::new() };
    let pause = (arguments.shared.take_over_after / 20).max(Duration::from_millis(25));
    loop {
        if cancel.is_cancelled() {
            teller.say("left", "it stood by no more");
            return Ok(ExitCode::from(CANCELLED));
        }
        let tenure = match store.take() {
            Ok(tenure) => tenure,
            Err(EvacuateError::Away { why, .. }) => {
                teller.say("away", &format!("{place} does not answer, and is waited for: {why}"));
                std::thread::sleep(pause);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        match tenure {
            Tenure::Another(holder) => {
                if let Ok(Some(over)) = outcome(&store)
                    && Some(&over) != ended.as_ref()
                {
                    return Ok(conclusion(&over, arguments.json));
                }
                teller.say("stands-by", &format!("stands by: {holder} coordinates"));
                std::thread::sleep(pause);
            }
            Tenure::Ours { number } => {
                let resumes = ended.as_ref().filter(|_| arguments.resume);
                let work = Work { arguments, plan: plan.as_ref(), resumes, place: &place, number };
                match work.done(&mut store, &mut reach, &cancel) {
                    Ok(Worked::Over(over)) => {
                        store.release();
                        return Ok(conclusion(&over, arguments.json));
                    }
                    Ok(Worked::Left) => {
                        store.release();
                        teller.say(
                            "left",
                            "moves under way go on, and so does the evacuation with another \
                             coordinator: --resume, or end it by --cancel",
                        );
                        return Ok(ExitCode::from(CANCELLED));
                    }
                    Err(error) => match error.downcast_ref::<EvacuateError>() {
                        Some(EvacuateError::Lost { .. }) => {
                            teller.say("lost", "another coordinator has taken over");
                        }
                        Some(EvacuateError::Away { why, .. }) => {
                            let text = format!("{place} does not answer, and is waited for: {why}");
                            teller.say("away", &text);
                        }
                        _ => {
                            store.release();
                            return Err(error);
                        }
                    },
                }
            }
        }
    }
}

enum Worked {
    Over(Value),
    Left,
}

/// What who has the lease does.
struct Work<'a> {
    arguments: &'a Arguments,
    plan: Option<&'a Plan>,
    /// It was over when this command was given, and is taken up again.
    resumes: Option<&'a Value>,
    place: &'a str,
    number: u64,
}

impl Work<'_> {
    fn done(
        &self,
        store: &mut NatsStore,
        reach: &mut Reach,
        cancel: &Cancel,
    ) -> anyhow::Result<Worked> {
        let arguments = self.arguments;
        if let Some(over) = outcome(store)? {
            if Some(&over) != self.resumes {
                return Ok(Worked::Over(over));
            }
            Runner::<&mut NatsStore>::uncancel(&mut &mut *store)?;
            store.put(keys::OUTCOME, b"")?;
        }
        match (read_plan(store)?, self.plan) {
            (None, None) => bail!("the plan in the store is gone"),
            (None, Some(plan)) => {
                reach.clear()?;
                let plan = Plan { home: reach.home().cloned(), ..plan.clone() };
                store.put(keys::PLAN, &serde_json::to_vec(&plan)?)?;
            }
            // Another may have been quicker to write its own.
            (Some(there), own) => {
                if own.is_some_and(|own| !there.is_same_as(own)) {
                    return Err(EvacuateError::Planned { place: self.place.to_owned() }.into());
                }
                if there.home.as_ref() != reach.home() {
                    *reach = Reach::shared(arguments, there.home.as_ref())?;
                }
            }
        }
        let directory = reach.home().map(|home| home.directory.clone());
        // Who asks on this host is answered here, if this is the host.
        let here = directory.filter(|_| matches!(reach, Reach::Here(..)));
        let held = here.as_ref().map(|directory| -> anyhow::Result<_> {
            let place = directory.display().to_string();
            let name = share_name(&run_directory::path(), &arguments.name, &place)?;
            Ok((name, serve_beside(&directory.join("control"))?))
        });
        let held = held.transpose()?;
        let (mut runner, events) = Runner::resume(&mut *store, self.place, reach.hands())?;
        let names = runner.plan().clone();
        if arguments.json {
            json_line(&json!({ "event": "coordinates", "number": self.number }));
        } else {
            println!("coordinates, as number {} of this evacuation", self.number);
            tell::heading(&names);
        }
        let desk = Desk {
            arguments,
            names: &names,
            cancel,
            requests: held.as_ref().map(|(_, (_, requests))| requests),
            shared: true,
        };
        match coordinate(&mut runner, &desk, &events)? {
            End::Left => Ok(Worked::Left),
            End::Over => {
                let report = runner.report();
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
                let took = now.saturating_sub(Duration::from_millis(names.began_ms));
                let cancelled = runner.wanted().cancelled;
                let over = tell::whole_report(&names, &report, took, cancelled).to_string();
                runner.publish()?;
                runner.conclude(over.as_bytes())?;
                if let Some(directory) = here {
                    std::fs::write(directory.with_file_name("report.json"), format!("{over}\n"))?;
                }
                // As all others read it, to the last digit.
                Ok(Worked::Over(serde_json::from_str(&over)?))
            }
        }
    }
}

/// Prints what became of the evacuation.
fn conclusion(over: &Value, json: bool) -> ExitCode {
    if json {
        json_line(over);
    } else {
        print!("{}", tell::ended_text(over, layout::width(&std::io::stdout())));
    }
    super::exit_code(
        over["in_doubt"].as_u64().unwrap_or(0),
        over["stayed"].as_u64().unwrap_or(0),
        over["outcome"] == "cancelled",
    )
}

/// Tells the evacuation in the store what to do, or how far it is.
pub(super) fn steer(arguments: &Arguments, request: &str) -> anyhow::Result<ExitCode> {
    let store = connect(arguments, false)?;
    let place = format!("{} '{}'", store.place(), arguments.name);
    let plan = read_plan(&store)?.ok_or(EvacuateError::NoPlan { place })?;
    let over = outcome(&store)?;
    if request != "status" {
        if let Some(over) = &over {
            bail!("the evacuation is over: {}; take it up again by --resume", tell::counts(over));
        }
        let refused = RefCell::new(None);
        store.change(keys::WANTED, &|now| {
            let old: Wanted =
                now.and_then(|it| serde_json::from_slice(it).ok()).unwrap_or_default();
            let new = wished(&plan, &old, request).unwrap_or_else(|why| {
                *refused.borrow_mut() = Some(why);
                old.clone()
            });
            serde_json::to_vec(&new).unwrap_or_default()
        })?;
        if let Some(why) = refused.into_inner() {
            bail!("it was refused: {why}");
        }
    }
    let wanted = store.read(keys::WANTED)?.unwrap_or_default();
    let wanted: Wanted = serde_json::from_slice(&wanted).unwrap_or_default();
    let mut answer = match &over {
        Some(over) => over.clone(),
        None => {
            let news = store.read(keys::NEWS)?.unwrap_or_default();
            serde_json::from_slice(&news).unwrap_or_else(|_| json!({ "vms": [] }))
        }
    };
    answer["paused"] = json!(wanted.paused);
    answer["cancelled"] = json!(wanted.cancelled);
    answer["budget_bytes_per_second"] =
        json!(wanted.bytes_per_second.unwrap_or(plan.bytes_per_second));
    answer["at_once"] = json!(wanted.at_once.unwrap_or(plan.at_once));
    answer["host"] = json!(plan.home.as_ref().map(|home| &home.host));
    answer["coordinator"] = match over {
        Some(_) => Value::Null,
        None => json!(heard(&store, arguments.shared.take_over_after)?),
    };
    if arguments.json {
        json_line(&answer);
        return Ok(ExitCode::SUCCESS);
    }
    let now = match request {
        "status" if wanted.cancelled => "it is cancelled. ".to_owned(),
        "status" if wanted.paused => "it is paused: --continue. ".to_owned(),
        _ => tell::asked(request, &answer),
    };
    println!("{now}{}", tell::counts(&answer));
    match (answer["outcome"].as_str(), answer["coordinator"].as_str()) {
        (Some(outcome), _) => println!("it is over: {outcome}"),
        (None, Some(coordinator)) => println!("{coordinator} coordinates"),
        (None, None) => println!(
            "nobody coordinates it: begin a coordinator by godwit evacuate --resume --store …"
        ),
    }
    println!("the budget is {}", tell::budget(&answer));
    Ok(ExitCode::SUCCESS)
}

/// What `request` makes of what was wanted.
fn wished(plan: &Plan, old: &Wanted, request: &str) -> Result<Wanted, String> {
    Ok(match request {
        "pause" => Wanted { paused: true, ..old.clone() },
        "continue" => Wanted { paused: false, ..old.clone() },
        "cancel" => Wanted { cancelled: true, ..old.clone() },
        other => {
            let rate = old.bytes_per_second.unwrap_or(plan.bytes_per_second);
            let now = (Rate::from_bytes_per_second(rate), old.at_once.unwrap_or(plan.at_once));
            let (budget, at_once) = limits::asked(other, now)?;
            Wanted {
                bytes_per_second: Some(budget.bytes_per_second()),
                at_once: Some(at_once),
                ..old.clone()
            }
        }
    })
}

/// The coordinator, if it is heard of before it would count as gone.
fn heard(store: &NatsStore, silence: Duration) -> Result<Option<String>, EvacuateError> {
    let until = Instant::now() + silence;
    let first = store.holder()?;
    loop {
        let now = store.holder()?;
        match (&first, now) {
            (Some((_, before)), Some((holder, revision))) if revision != *before => {
                return Ok(Some(holder));
            }
            (None, Some((holder, _))) => return Ok(Some(holder)),
            (_, now) if now.is_none() || Instant::now() > until => return Ok(None),
            _ => std::thread::sleep(silence / 50),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_this_host_or_another() {
        for (text, host, encrypted) in [
            ("nats://127.0.0.1:4222", "127.0.0.1", false),
            ("localhost", "localhost", false),
            ("tls://user:pass@store.example:4222/", "store.example", true),
            ("nats://[::1]:4222", "::1", false),
        ] {
            assert_eq!(server(text), Ok((host.to_owned(), encrypted)));
        }
        assert!(server("http://x").unwrap_err().contains("write nats://HOST:PORT"));
        assert!(server("nats://:4222").unwrap_err().contains("no host"));
        assert!(["localhost", "127.0.0.2", "::1"].into_iter().all(is_this_host));
        assert!(!["192.0.2.1", "store.example", "127.0.0.1.example"].into_iter().any(is_this_host));
    }

    #[test]
    fn a_wish_changes_what_it_names() {
        let plan = Plan {
            bytes_per_second: 1e6,
            at_once: 4,
            cpu_percent: None,
            options: Vec::new(),
            vms: Vec::new(),
            destinations: Vec::new(),
            forecast_seconds: 0.0,
            began_ms: 0,
            home: None,
        };
        let wish = |old: &Wanted, word: &str| wished(&plan, old, word);
        let paused = wish(&Wanted::default(), "pause").unwrap();
        let limited = wish(&paused, "set at-once=8").unwrap();
        assert_eq!((limited.paused, limited.at_once), (true, Some(8)));
        assert_eq!(limited.bytes_per_second, Some(1e6));
        assert!(!wish(&limited, "continue").unwrap().paused);
        assert!(wish(&paused, "explode").unwrap_err().contains("not understood"));
    }
}
