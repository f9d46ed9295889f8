//! `godwit plan`: what a migration would be like, told before it is begun.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_codec::Codec;
use godwit_control::client;
use godwit_disk::DiskChoice;
use godwit_engine::address::Address;
use godwit_engine::compression::Compression;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::measure::{Measured, measure};
use godwit_engine::source::{Options, inquire};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError};
use godwit_policy::{Settings, ThrottleMode};
use godwit_qemu::{ListedDisk, QemuSource, StateBy};
use godwit_sim::{Forecast, GuestSpec, Sample, Scenario, Synchronisation, fit, forecast, plain};
use godwit_units::{
    ByteCount, GRAMMAR, PAGE_SIZE, PageCount, Rate, TypedRate, format_duration, parse_duration,
};
use serde_json::{Value, json};

use crate::layout::{self, Column};
use crate::output::{self, json_line};
use crate::process::{self, CANCELLED, FAILED};
use crate::security::SecurityArguments;
use crate::settings::Assignment;
use crate::vm::VmName;

/// Bytes on the wire for a page as it is, its share of the run table among them.
const PAGE_ON_WIRE: f64 = 4100.0;
/// Bytes a second that LZ4 takes in, on the two processors that a migration may count on.
const LZ4: f64 = 1.2e9;
/// What is foretold when no link was named.
const LINKS: [&str; 3] = ["1Gbit", "10Gbit", "25Gbit"];

/// Tell what a migration would be like, without migrating.
///
/// The guest's writes are tracked for a few seconds, which costs it about what a migration costs it
/// while copying. What was seen is made into a guest for the simulator, which then migrates that
/// under the policy of real migrations, with several settings.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    /// The VM, as for `godwit migrate`
    #[arg(long, value_name = "VM")]
    vm: VmName,

    /// What the link carries, in bits (10Gbit) or bytes (128MiB/s) per second; more than once for
    /// several [default: 1Gbit, 10Gbit and 25Gbit]
    #[arg(long, value_name = "RATE")]
    link: Vec<TypedRate>,

    /// How long to measure
    #[arg(long = "for", value_name = "TIME", default_value = "4s", value_parser = measuring)]
    time: Duration,

    /// A setting of the migration, as `godwit migrate --set` takes it; then only that is foretold
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = Assignment,
        hide_possible_values = true)]
    settings: Vec<(String, String)>,

    /// Disks that would move along, as for `godwit migrate`: prints the commands that make images
    /// for them at the destination, where they must be before its VM is started. What they add to
    /// the migration is not foretold
    #[arg(long, value_name = "all|none|NAME,...", default_value = "none")]
    disks: DiskChoice,

    /// Where `godwit receive` waits for the guest: asks it whether the guest fits there, as
    /// `godwit migrate` would, and tells what differs. It goes on waiting. The exit code is 1 where
    /// the guest would be refused
    #[arg(long, value_name = "ADDR")]
    to: Option<Address>,

    #[command(flatten)]
    security: SecurityArguments,

    /// Differences that would be let pass, as for `godwit migrate`
    #[arg(long, value_name = "all|KEY,...", value_delimiter = ',', requires = "to")]
    allow_differences: Vec<String>,

    /// Disks that do not move along are on shared storage, as for `godwit migrate`
    #[arg(long, requires = "to")]
    disks_are_shared: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn measuring(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    let bounds = Duration::from_millis(200)..=Duration::from_secs(600);
    if bounds.contains(&time) { Ok(time) } else { Err("use a time from 200ms to 10min".to_owned()) }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let cancel = process::cancel_on_signals();
    if !arguments.json {
        eprintln!("godwit: looking at the guest for {}", format_duration(arguments.time));
    }
    let (settings, compression) = match settings(&arguments.settings) {
        Ok(settings) => settings,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(process::USAGE);
        }
    };
    let (measured, told) = match look(arguments, &cancel) {
        Ok(seen) => seen,
        Err(_) if cancel.is_cancelled() => {
            output::refusal(&EngineError::Cancelled, arguments.json);
            return ExitCode::from(CANCELLED);
        }
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(FAILED);
        }
    };
    let links = if arguments.link.is_empty() {
        LINKS.iter().filter_map(|link| link.parse().ok()).collect()
    } else {
        arguments.link.clone()
    };
    let guest = guest(&measured);
    let plans: Vec<Plan> = links
        .into_iter()
        .map(|link| {
            let cases: Vec<Settings> = settings.iter().map(|(_, settings)| *settings).collect();
            let mut scenario = scenario(&measured, guest.clone(), link.rate());
            scenario.handover = handover(&arguments.vm);
            if compression != Compression::Auto {
                let share = if compression == Compression::Fixed(Codec::None) {
                    1.0
                } else {
                    measured.compressed
                };
                scenario.link.page_bytes = PAGE_ON_WIRE * share;
            }
            (link, forecast(&scenario, &cases))
        })
        .collect();
    if arguments.json {
        let mut plan = as_json(&measured, &settings, &plans);
        plan["images"] = json!(told.images);
        plan["guest_disks"] = json!(output::disks_json(&told.disks));
        plan["receive"] = json!(told.receive);
        plan["advice"] = json!(told.advice);
        plan["writers"] = json!(told.writers);
        plan["device_state"] = json!(told.device_state.map(|by| match by {
            StateBy::Migration => "migration",
            StateBy::Saving => "saving",
        }));
        if let Some(to) = &arguments.to {
            let (to, refusal) = (to.to_string(), &told.refusal);
            plan["destination"] =
                json!({ "address": to, "accepts": refusal.is_none(), "refusal": refusal });
        }
        json_line(&plan);
    } else {
        let width = layout::width(&std::io::stdout());
        if let Some(by) = told.device_state {
            print!("{}", output::labelled("devices", 10, device_state(by), width));
            let writers = told.writers.join(", ");
            print!("{}", output::labelled("writers", 10, &writers, width));
        }
        print!("{}", as_text(&measured, &settings, &plans, width));
        if let Some(to) = &arguments.to {
            let answer = match &told.refusal {
                None => format!("{to} would accept the guest"),
                Some(why) => format!("{to} would refuse the guest: {why}"),
            };
            println!("\n{}", layout::wrap("destination: ", &answer, 13, width));
        }
        if !told.disks.is_empty() {
            print!("\n{}", output::disk_list(&told.disks));
        }
        if let Some(advice) = told.advice {
            println!("\n{}", layout::wrap("advice: ", advice, 8, width));
        }
        if !told.images.is_empty() {
            println!(
                "\nimages at the destination, to be made before its VM is started:\n  {}",
                told.images.join("\n  ")
            );
            println!(
                "\nand godwit receive must be told that they may be overwritten:\n  {}",
                told.receive
            );
        }
    }
    if told.refusal.is_some() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
}

/// What there is to tell beside figures.
#[derive(Debug, Default)]
struct Told {
    /// The commands that make images for the guest's disks.
    images: Vec<String>,
    /// The guest's disks.
    disks: Vec<ListedDisk>,
    /// The command that takes the guest in, at the destination.
    receive: String,
    /// What could be done about free memory.
    advice: Option<&'static str>,
    /// How the device state is had, of a QEMU.
    device_state: Option<StateBy>,
    /// The processes that write its guest's memory.
    writers: Vec<String>,
    /// Why the destination would refuse the guest, where it was asked.
    refusal: Option<String>,
}

/// What `by` means to the operator.
fn device_state(by: StateBy) -> &'static str {
    match by {
        StateBy::Migration => "by QEMU's own migration, which leaves out RAM in shared files",
        StateBy::Saving => {
            "saved by themselves (xen-save-devices-state), as RAM is QEMU's own or other processes \
             write it: it is read and tracked where it is mapped"
        }
    }
}

/// What was seen of the guest, and what there is to tell beside it.
fn look(
    arguments: &Arguments,
    cancel: &Cancel,
) -> Result<(Measured, Told), Box<dyn std::error::Error>> {
    let Arguments { vm, disks, .. } = arguments;
    match vm {
        VmName::Qemu(_) => {
            let (vm, measured, told) = look_at_qemu(vm.source()?, arguments, cancel)?;
            let receive = format!("godwit receive --disks {disks} --vm qemu:PATH --listen ADDR");
            let images = vm.image_commands();
            Ok((measured, Told { images, receive, ..told }))
        }
        VmName::Libvirt { .. } => {
            let (_, measured, told) = look_at_qemu(vm.source()?, arguments, cancel)?;
            let receive = format!("godwit receive --disks {disks} --vm libvirt: --listen ADDR");
            Ok((measured, Told { receive, ..told }))
        }
        VmName::Proxmox(_) => {
            let (vm, measured, told) = look_at_qemu(vm.source()?, arguments, cancel)?;
            let receive = format!("godwit receive --disks {disks} --start --listen ADDR");
            let images = vm.image_commands();
            Ok((measured, Told { images, receive, ..told }))
        }
        VmName::Microvm(_) if !disks.is_none() => {
            Err("a microvm's image is a plain file of the source's size: truncate -s SIZE FILE"
                .into())
        }
        VmName::Microvm(_) if arguments.to.is_some() => {
            Err("--to is for QEMU's: a microvm fits where its memory and its disks are as large, \
                 and each migration asks that before anything else"
                .into())
        }
        VmName::Microvm(path) => {
            Ok((client::measure(path, arguments.time, cancel)?, Told::default()))
        }
    }
}

/// What every QEMU is asked, whoever started it.
fn look_at_qemu(
    mut vm: QemuSource,
    arguments: &Arguments,
    cancel: &Cancel,
) -> Result<(QemuSource, Measured, Told), Box<dyn std::error::Error>> {
    if !arguments.disks.is_none() {
        vm = vm.with_disks(&arguments.disks, None)?;
    }
    vm = vm.allowing(&arguments.allow_differences);
    if arguments.disks_are_shared {
        vm = vm.sharing_disks();
    }
    let told = Told {
        disks: vm.disk_list()?,
        advice: vm.reporting()?.advice(),
        device_state: Some(vm.state_by()),
        writers: vm.writers(),
        refusal: arguments
            .to
            .as_ref()
            .map_or(Ok(None), |to| ask(&mut vm, to, &arguments.security, cancel))?,
        ..Told::default()
    };
    let measured = measure(&mut vm, arguments.time, cancel)?;
    Ok((vm, measured, told))
}

/// Why the destination at `to` would refuse the guest, if it would.
fn ask(
    vm: &mut dyn SourceVm,
    to: &Address,
    security: &SecurityArguments,
    cancel: &Cancel,
) -> Result<Option<String>, EngineError> {
    let security = security.wish().source(to)?;
    let options = Options { security, ..Options::new(to.clone()) };
    inquire(vm, &options, None, cancel).map(|inquiry| inquiry.refusal)
}

/// The cases to tell of: what was asked for, or a choice.
fn settings(given: &[(String, String)]) -> Result<(Vec<(String, Settings)>, Compression), String> {
    let default = Settings::default();
    if !given.is_empty() {
        let handle = MigrationHandle::typed(given.to_vec(), Cancel::default());
        let handle = handle.map_err(|error| error.to_string())?;
        let names: Vec<String> =
            given.iter().map(|(key, value)| format!("{key}={value}")).collect();
        return Ok((vec![(names.join(" "), handle.policy())], handle.compression()));
    }
    let with = |throttle, downtime_limit| Settings { throttle, downtime_limit, ..default };
    let limit = default.downtime_limit;
    let cases = vec![
        ("default".to_owned(), default),
        ("throttle=off".to_owned(), with(ThrottleMode::Off, limit)),
        ("throttle=direct".to_owned(), with(ThrottleMode::Direct, limit)),
        ("downtime-limit=50ms".to_owned(), with(default.throttle, Duration::from_millis(50))),
        ("downtime-limit=1s".to_owned(), with(default.throttle, Duration::from_secs(1))),
    ];
    Ok((cases, Compression::Auto))
}

/// A guest for the simulator that dirties memory as the real one was seen to.
pub(crate) fn guest(measured: &Measured) -> GuestSpec {
    let samples: Vec<Sample> = measured
        .dirty
        .iter()
        .map(|(seconds, pages)| Sample {
            interval: Duration::try_from_secs_f64(*seconds).unwrap_or_default(),
            dirty: PageCount(*pages),
        })
        .collect();
    fit(ByteCount(measured.memory_bytes), ByteCount(measured.data_bytes), &samples)
}

fn scenario(measured: &Measured, guest: GuestSpec, link: Rate) -> Scenario {
    let mut scenario = plain("plan", guest, link);
    let look = Duration::try_from_secs_f64(measured.look_seconds).unwrap_or_default();
    scenario.synchronisation = Synchronisation::Pieces(look);
    scenario.governor = measured.can_govern;
    // What `auto` comes to: LZ4 on two processors, where the link is slower than that.
    let rate = link.bytes_per_second();
    scenario.link.page_bytes =
        (PAGE_ON_WIRE * measured.compressed).max(PAGE_SIZE as f64 * rate / LZ4).min(PAGE_ON_WIRE);
    scenario
}

fn time(seconds: f64) -> String {
    format_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Device state and handover, as measured (docs/benchmarks.md).
fn handover(vm: &VmName) -> Duration {
    match vm {
        VmName::Qemu(_) | VmName::Libvirt { .. } | VmName::Proxmox(_) => Duration::from_millis(8),
        VmName::Microvm(_) => Duration::from_millis(1),
    }
}

/// How fast pages were dirtied over the first second that was seen.
fn dirty_rate(measured: &Measured) -> Rate {
    let sample =
        measured.dirty.iter().rfind(|(seconds, _)| *seconds <= 1.0).or(measured.dirty.first());
    let (seconds, pages) = sample.copied().unwrap_or((1.0, 0));
    Rate::from_bytes_per_second(pages as f64 * PAGE_SIZE as f64 / seconds.max(1e-3))
}

/// A link and what is foretold of it, a case each.
type Plan = (TypedRate, Vec<Forecast>);

fn as_text(
    measured: &Measured,
    settings: &[(String, Settings)],
    plans: &[Plan],
    width: usize,
) -> String {
    let (seconds, pages) = measured.dirty.last().copied().unwrap_or_default();
    let governor = if measured.can_govern {
        "yes: a guest that outruns the link can be held to a dirty-rate limit"
    } else {
        "no: a guest that outruns the link has its processors throttled"
    };
    let lines = [
        (
            "memory",
            format!(
                "{}, of which {} would be sent; LZ4 makes {:.0} % of that",
                ByteCount(measured.memory_bytes),
                ByteCount(measured.data_bytes),
                measured.compressed * 100.0
            ),
        ),
        (
            "dirtied",
            format!(
                "{} within {}; {} over the first second",
                PageCount(pages).bytes(),
                time(seconds),
                dirty_rate(measured)
            ),
        ),
        ("governor", governor.to_owned()),
    ];
    let mut text: String =
        lines.iter().map(|(label, text)| output::labelled(label, 10, text, width)).collect();
    let mut tables = false;
    for (link, forecasts) in plans {
        let heading = format!("over a link of {}", link.both());
        match alike(forecasts) {
            Some(any) if forecasts.len() > 1 => {
                let told = format!("{heading}: {}; no setting makes a difference", in_words(any));
                text += &format!("\n{}\n", layout::wrap("", &told, 2, width));
            }
            _ => {
                tables = true;
                text += &format!("\n{heading}\n{}", table(settings, forecasts, width));
            }
        }
    }
    if tables {
        let legend = "total: from the start until the guest runs at the destination; range: the \
                      same over a link a fifth faster or slower; slowed: the most that is taken \
                      from the guest's processors, or governed: held to a dirty-rate limit; \
                      lost: how much of the guest's work that and the downtime cost";
        text += &format!("\n{}\n", layout::wrap("", legend, 2, width));
    }
    text
}

/// One of `forecasts`, if a table of all would say the same in every line.
fn alike(forecasts: &[Forecast]) -> Option<&Forecast> {
    let first = forecasts.first()?;
    let near =
        |one: f64, other: f64, least: f64| (one - other).abs() <= least.max(0.02 * one.max(other));
    let same = |forecast: &Forecast| {
        forecast.finishes
            && !forecast.governed
            && forecast.throttle == 0.0
            && near(forecast.seconds.1, first.seconds.1, 0.02)
            && near(forecast.downtime, first.downtime, 0.005)
            && near(forecast.lost_work, first.lost_work, 0.005)
    };
    forecasts.iter().all(same).then_some(first)
}

fn in_words(forecast: &Forecast) -> String {
    let (low, mid, high) = forecast.seconds;
    format!(
        "{} ({} to {}), {} sent, downtime {}, the guest never slowed",
        time(mid),
        time(low),
        time(high),
        ByteCount(forecast.bytes as u64),
        time(forecast.downtime),
    )
}

fn table(settings: &[(String, Settings)], forecasts: &[Forecast], width: usize) -> String {
    let columns = [
        Column::words("settings", 0),
        Column::number("total", 1),
        Column::number("range", 4),
        Column::number("sent", 6),
        Column::number("downtime", 2),
        Column::number("slowed", 3),
        Column::number("lost", 5),
    ];
    let row = |((name, _), forecast): (&(String, Settings), &Forecast)| {
        let (low, mid, high) = forecast.seconds;
        if !forecast.finishes {
            let mut cells =
                vec![name.clone(), "never".to_owned(), format!("gives up: {}", time(mid))];
            cells.resize(columns.len(), "-".to_owned());
            return cells;
        }
        let slowed = match forecast {
            Forecast { governed: true, .. } => "governed".to_owned(),
            Forecast { throttle, .. } if *throttle > 0.0 => format!("{:.0} %", throttle * 100.0),
            _ => "-".to_owned(),
        };
        vec![
            name.clone(),
            time(mid),
            format!("{} to {}", time(low), time(high)),
            ByteCount(forecast.bytes as u64).to_string(),
            time(forecast.downtime),
            slowed,
            time(forecast.lost_work),
        ]
    };
    layout::table(&columns, &settings.iter().zip(forecasts).map(row).collect::<Vec<_>>(), 2, width)
}

fn as_json(measured: &Measured, settings: &[(String, Settings)], plans: &[Plan]) -> Value {
    let plans: Vec<Value> = plans
        .iter()
        .map(|(link, forecasts)| {
            let cases: Vec<Value> = settings
                .iter()
                .zip(forecasts)
                .map(|((name, settings), forecast)| {
                    let shown: serde_json::Map<String, Value> = Settings::TABLE
                        .shown(settings)
                        .into_iter()
                        .map(|(key, value)| (key.to_owned(), value.into()))
                        .collect();
                    json!({ "case": name, "settings": shown, "forecast": forecast })
                })
                .collect();
            json!({
                "link": link.to_string(),
                "link_bytes_per_second": link.rate().bytes_per_second(),
                "cases": cases,
            })
        })
        .collect();
    json!({ "measured": measured, "plans": plans })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured { dirty: vec![(4.0, u64::MAX >> 14)], can_govern: true, ..Measured::default() }
    }

    fn forecast(settings: usize, governed: bool, throttle: f64) -> Vec<Forecast> {
        let one = Forecast {
            finishes: true,
            seconds: (35.0 * 60.0, 35.9 * 60.0, 36.0 * 60.0),
            bytes: 1023.0 * 1.099_511_627_776e12,
            downtime: 3599.0,
            throttle,
            governed,
            lost_work: 3599.0,
        };
        vec![one; settings]
    }

    fn text(governed: bool, throttle: f64, width: usize) -> String {
        let (settings, _) = settings(&[]).unwrap();
        let mut forecasts = forecast(settings.len(), governed, throttle);
        if throttle > 0.0 {
            forecasts[1].finishes = false;
        }
        as_text(&measured(), &settings, &[("1Gbit".parse().unwrap(), forecasts)], width)
    }

    #[test]
    fn plans_fit_80_columns() {
        for width in [40, 80, 120] {
            let text =
                text(true, 0.99, width) + &text(false, 0.99, width) + &text(false, 0.0, width);
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= width, "{text}");
        }
        assert!(text(true, 0.5, 120).contains("sent"), "wide ones show more");
    }

    #[test]
    fn a_quiet_guest_gets_a_sentence() {
        let quiet = text(false, 0.0, 200);
        assert!(
            quiet.contains(
                "over a link of 1Gbit (119MiB/s): 35.9min (35min to 36min), 1023TiB sent"
            )
        );
        assert!(
            quiet.contains("no setting makes a difference") && !quiet.contains("settings "),
            "{quiet}"
        );
        let busy = text(true, 0.5, 80);
        assert!(busy.contains("governed") && busy.contains("gives up: 35.9min"), "{busy}");
        assert!(busy.contains("total: from the start"), "the columns are explained: {busy}");
    }
}
