//! Destinations whose godwitd is asked: what room they have, and that they take guests in.
//!
//! Invariant: what the list says of a destination stands; only what it leaves out is asked for.

use std::path::Path;

use anyhow::{Context, bail};
use godwit_daemon::client::HostAddress;
use godwit_daemon::messages::{Answer, Request, Room};
use godwit_evacuate::{List, ListedDestination};

use crate::host::client;

/// Adds those of `to` to the list, and what godwitd says of those that are asked. Guests are taken
/// in by `godwit`, as it is called on the host that is emptied.
///
/// # Errors
/// When one is not there, or takes no guests in.
pub(super) fn ask(
    list: &mut List,
    to: &[HostAddress],
    keys: Option<&Path>,
    godwit: &str,
) -> anyhow::Result<()> {
    let keys = keys.map(std::path::absolute).transpose().context("--keys")?;
    for host in to {
        let is_taken = list.destinations.iter().any(|listed| listed.name == host.name());
        list.destinations.push(ListedDestination {
            name: if is_taken { host.to_string() } else { host.name().to_owned() },
            godwitd: Some(host.to_string()),
            ..ListedDestination::default()
        });
    }
    for listed in &mut list.destinations {
        let Some(text) = listed.godwitd.clone() else { continue };
        let place = || format!("destination '{}'", listed.name);
        let host: HostAddress = text.parse().map_err(anyhow::Error::msg).with_context(place)?;
        let answer = client(host, keys.clone(), None).ask(&Request::Room {});
        let Answer::Room(room) = answer.with_context(place)? else {
            bail!("{}: {text} answers something else", place());
        };
        if room.ways.is_empty() {
            bail!("{}: {text} has no way to take guests in (docs/godwitd.md)", place());
        }
        fill(listed, &room, command(godwit, &text, keys.as_deref()));
    }
    Ok(())
}

/// What takes a guest in there.
fn command(godwit: &str, host: &str, keys: Option<&Path>) -> Vec<String> {
    let words =
        [godwit, "host", "receive", host, "--name", "{name}", "--memory", "{memory}", "--json"];
    let keys = keys.map(|keys| format!("--keys={}", keys.display()));
    words.into_iter().map(str::to_owned).chain(keys).collect()
}

/// Puts what is known of a host where the list says nothing.
fn fill(listed: &mut ListedDestination, room: &Room, command: Vec<String>) {
    if listed.memory.is_empty() {
        listed.memory = format!("{}B", room.room_bytes);
    }
    if listed.cpus.is_empty() {
        listed.cpus.clone_from(&room.cpus);
    }
    listed.at_once = listed.at_once.or(Some(room.at_once));
    listed.receive.get_or_insert(command);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_list_says_of_a_host_stands() {
        let room =
            Room { room_bytes: 5, at_once: 3, cpus: vec!["EPYC".to_owned()], ..Room::default() };
        let mut asked = ListedDestination::default();
        fill(&mut asked, &room, command("godwit", "godwitd://east:1", Some(Path::new("/k"))));
        assert_eq!((asked.memory.as_str(), asked.at_once), ("5B", Some(3)));
        assert_eq!(asked.cpus, ["EPYC"]);
        let words = "godwit host receive godwitd://east:1 --name {name} --memory {memory} --json \
                     --keys=/k";
        assert_eq!(asked.receive.unwrap().join(" "), words);
        let mut told = ListedDestination {
            memory: "1GiB".to_owned(),
            cpus: vec!["Nehalem".to_owned()],
            at_once: Some(1),
            receive: Some(vec!["ssh".to_owned()]),
            ..ListedDestination::default()
        };
        let before = format!("{told:?}");
        fill(&mut told, &room, Vec::new());
        assert_eq!(format!("{told:?}"), before);
    }
}
