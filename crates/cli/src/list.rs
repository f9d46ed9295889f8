//! `godwit list`: the VMs of this host, whatever runs them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use godwit_control::client;
use godwit_qemu::{HostVm, RamKind, Verdict, vms_of_host};
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::layout::{self, Column};
use crate::output::json_line;
use crate::process::FAILED;
use crate::vm::libvirt_uri;

/// Show the VMs of this host, whatever runs them, and whether they could move.
///
/// QEMUs are found among the processes, with who keeps them (libvirt, Proxmox VE, Incus or nobody),
/// and godwit's microvms. Those whose monitor is free are asked what godwit migrate would refuse;
/// nothing is changed, and nobody has to wait. Exit codes: 0, also where nothing runs or could
/// move; 1 where the processes cannot be read.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only these, by their processes or names
    #[arg(value_name = "PID|NAME")]
    only: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One VM as it is shown.
struct Row {
    pid: i32,
    name: Option<String>,
    by: &'static str,
    id: Option<String>,
    accelerator: Option<String>,
    ram: Option<ByteCount>,
    kind: Option<&'static str>,
    huge_pages: Option<ByteCount>,
    state: Option<String>,
    vm: Option<String>,
    verdict: Verdict,
}

impl From<HostVm> for Row {
    fn from(vm: HostVm) -> Self {
        Self {
            pid: vm.pid,
            name: vm.name,
            by: vm.owner.word(),
            id: vm.owner.id().map(str::to_owned),
            accelerator: vm.accelerator,
            ram: vm.ram,
            kind: vm.ram_kind.map(RamKind::word),
            huge_pages: vm.huge_pages,
            state: vm.state,
            vm: vm.vm,
            verdict: vm.verdict,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let found = match vms_of_host(&arguments.only, &libvirt_uri(None)) {
        Ok(found) => found,
        Err(error) => {
            eprintln!("godwit: the processes of this host cannot be read in /proc: {error}");
            return ExitCode::from(FAILED);
        }
    };
    let mut rows: Vec<Row> = found.vms.into_iter().map(Row::from).collect();
    rows.extend(microvms(&arguments.only));
    rows.sort_by_key(|row| row.pid);
    if arguments.json {
        let vms: Vec<Value> = rows.iter().map(as_json).collect();
        json_line(&json!({ "vms": vms, "not_visible": found.hidden }));
        return ExitCode::SUCCESS;
    }
    let width = layout::width(&std::io::stdout());
    match rows.is_empty() {
        true => println!("no VM runs on this host that can be seen"),
        false => print!("{}", as_text(&rows, width)),
    }
    if let Some(hidden) = found.hidden {
        println!("{}", layout::wrap("", hidden, 0, width));
    }
    ExitCode::SUCCESS
}

/// The microvms of this host, or those among `only`.
fn microvms(only: &[String]) -> Vec<Row> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let wanted = names.filter(|name| only.is_empty() || only.contains(name));
    wanted.filter_map(|name| microvm(name.parse().ok()?)).collect()
}

fn microvm(pid: i32) -> Option<Row> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let mut first = words.iter();
    let is_ours = first.next()?.rsplit('/').next() == Some("godwit")
        && first.next()? == "microvm"
        && first.next()? == "run";
    if !is_ours {
        return None;
    }
    let after = words.windows(2).find(|pair| pair[0] == "--control").map(|pair| &*pair[1]);
    let control = after.or_else(|| words.iter().find_map(|word| word.strip_prefix("--control=")));
    let no_control = || "it has no control socket: start it with --control PATH".to_owned();
    let path = control.map(|path| here(pid, Path::new(path))).ok_or_else(no_control);
    let status = path.and_then(|path| {
        let status = client::status(&path).map_err(|error| error.to_string())?;
        Ok((path, status))
    });
    let mut row = Row {
        pid,
        name: None,
        by: "microvm",
        id: None,
        accelerator: Some("kvm".to_owned()),
        ram: None,
        kind: None,
        huge_pages: None,
        state: None,
        vm: None,
        verdict: Verdict::Moves,
    };
    match status {
        Err(why) => row.verdict = Verdict::Refused(why),
        Ok((path, status)) => {
            row.ram = Some(status.ram.iter().map(|(_, bytes)| ByteCount(*bytes)).sum());
            let is_memfd = |path: &PathBuf| path.starts_with("/proc");
            row.kind = Some(if status.ram_files.iter().all(is_memfd) { "memfd" } else { "file" });
            if !matches!(status.state.as_str(), "running" | "paused") {
                row.verdict = Verdict::Refused(format!("it is {}", status.state));
            }
            row.vm = Some(format!("microvm:{}", path.display()));
            row.state = Some(status.state);
        }
    }
    Some(row)
}

/// A path of another process as this one reaches it.
fn here(pid: i32, path: &Path) -> PathBuf {
    let directory = std::fs::read_link(format!("/proc/{pid}/cwd"));
    directory.map_or_else(|_| path.to_owned(), |directory| directory.join(path))
}

fn as_json(row: &Row) -> Value {
    let (moves, why) = match &row.verdict {
        Verdict::Moves => (Some(true), None),
        Verdict::Refused(why) => (Some(false), Some(why)),
        Verdict::Unknown(why) => (None, Some(why)),
    };
    json!({
        "pid": row.pid,
        "name": row.name,
        "by": row.by,
        "id": row.id,
        "accelerator": row.accelerator,
        "ram_bytes": row.ram.map(|bytes| bytes.0),
        "ram_kind": row.kind,
        "huge_page_bytes": row.huge_pages.map(|bytes| bytes.0),
        "state": row.state,
        "vm": row.vm,
        "moves": moves,
        "why": why,
    })
}

fn as_text(rows: &[Row], width: usize) -> String {
    let columns = [
        Column::number("pid", 1),
        Column::words("name", 2),
        Column::words("by", 3),
        Column::words("accel", 6),
        Column::number("RAM", 4),
        Column::words("kind", 7),
        Column::words("state", 5),
        Column::words("--vm", 0),
        Column::words("moves", 0),
    ];
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let cells = |row: &Row| {
        let huge = if row.huge_pages.is_some() { ", huge" } else { "" };
        vec![
            row.pid.to_string(),
            or_dash(row.name.clone()),
            row.by.to_owned(),
            or_dash(row.accelerator.clone()),
            or_dash(row.ram.map(|bytes| bytes.to_string())),
            or_dash(row.kind.map(|kind| format!("{kind}{huge}"))),
            or_dash(row.state.clone()),
            or_dash(row.vm.clone()),
            match row.verdict {
                Verdict::Moves => "yes",
                Verdict::Refused(_) => "no",
                _ => "?",
            }
            .to_owned(),
        ]
    };
    let table: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let mut text = layout::table(&columns, &table, 0, width);
    let mut gap = "\n";
    for row in rows {
        let (Verdict::Refused(why) | Verdict::Unknown(why)) = &row.verdict else { continue };
        let label = row.name.clone().map_or_else(String::new, |name| format!(" ({name})"));
        text +=
            &format!("{gap}{}\n", layout::wrap(&format!("{}{label}: ", row.pid), why, 4, width));
        gap = "";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pid: i32, verdict: Verdict) -> Row {
        Row {
            pid,
            name: Some("web01".to_owned()),
            by: "libvirt",
            id: Some("web01".to_owned()),
            accelerator: Some("kvm".to_owned()),
            ram: Some(ByteCount(64 << 30)),
            kind: Some("anonymous"),
            huge_pages: None,
            state: Some("running".to_owned()),
            vm: Some("libvirt:web01".to_owned()),
            verdict,
        }
    }

    #[test]
    fn the_table_fits_80_columns_and_says_why_behind_it() {
        let why = "a reason that is longer than what is left of the line, which is not very much";
        let rows = [
            row(4_194_303, Verdict::Moves),
            row(17, Verdict::Refused(why.to_owned())),
            row(18, Verdict::Unknown("nobody could be asked".to_owned())),
        ];
        let text = as_text(&rows, 80);
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 80, "{text}");
        assert!(
            text.contains("libvirt:web01  yes") && text.contains("libvirt:web01  no"),
            "{text}"
        );
        assert!(text.contains("\n\n17 (web01): a reason") && text.contains("\n18 (web01): nobody"));
        assert!(as_text(&rows, 160).contains("kind"));
    }

    #[test]
    fn programs_are_told_the_same() {
        let yes = as_json(&row(1, Verdict::Moves));
        assert_eq!((&yes["moves"], &yes["why"]), (&json!(true), &Value::Null));
        let no = as_json(&row(1, Verdict::Refused("no".to_owned())));
        assert_eq!((&no["moves"], &no["why"]), (&json!(false), &json!("no")));
        let unknown = as_json(&row(1, Verdict::Unknown("?".to_owned())));
        assert_eq!((&unknown["moves"], &unknown["why"]), (&Value::Null, &json!("?")));
    }
}
