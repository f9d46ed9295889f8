//! What the operator of the host allows: a file, and options that take the place of what is in it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use godwit_daemon::messages::Guest;
use godwit_engine::address::Address;
use godwit_engine::security::{Security, SecurityWish};
use godwit_evacuate::{exact, filled, fits};
use godwit_qemu::run_directory;
use godwit_report::Store;
use godwit_units::ByteCount;
use serde::Deserialize;

use crate::Arguments;
use crate::handed::{Handed, Places};

const USUAL: &str = "/etc/godwit/godwitd.toml";
/// A destination that nobody comes to ends after this time.
const WAIT: &str = "5min";
/// Of `godwit receive`: who asks for a destination has no say in them, and neither has a way.
const OURS: [&str; 5] = ["--listen", "--json", "--keys", "--peer", "--insecure"];

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<String>,
    keys: Option<PathBuf>,
    #[serde(default)]
    peers: Vec<String>,
    moves: Option<String>,
    metrics: Option<SocketAddr>,
    socket: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    reserve: Option<String>,
    at_once: Option<u32>,
    #[serde(default)]
    cpus: Vec<String>,
    #[serde(default)]
    way: BTreeMap<String, Way>,
}

/// A way to take guests in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Way {
    receive: Vec<String>,
}

/// What godwitd may do, and where.
#[derive(Debug)]
pub(crate) struct Config {
    /// Where other hosts ask, and how connections are made there.
    pub(crate) listen: Option<(Address, Security)>,
    /// Where the operator asks.
    pub(crate) socket: PathBuf,
    /// Where metrics are served.
    pub(crate) metrics: Option<SocketAddr>,
    /// Where destinations are written down.
    pub(crate) state: PathBuf,
    /// Memory that is kept for the host; none: a part of what it has.
    pub(crate) reserve: Option<ByteCount>,
    /// The most guests at once.
    pub(crate) at_once: u32,
    /// Models of processors that the host can be.
    pub(crate) cpus: Vec<String>,
    /// The host's name in the addresses of destinations.
    pub(crate) moves: Option<String>,
    keys: Option<PathBuf>,
    peers: Vec<String>,
    ways: BTreeMap<String, Way>,
    /// What it was read from.
    place: String,
}

impl Config {
    /// Reads the file that `arguments` names, or the usual one, and puts them in the place of what
    /// is in it, and what was `handed` over where nothing is said.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub(crate) fn read(arguments: &Arguments, handed: &Handed) -> anyhow::Result<Self> {
        let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.exists());
        let path = arguments.config.clone().or_else(usual);
        let place = path.as_deref().unwrap_or(Path::new(USUAL)).display().to_string();
        let file = match &path {
            None => File::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path);
                parse(&text.with_context(|| place.clone())?).with_context(|| place.clone())?
            }
        };
        Self::of(file, arguments, place, handed.places()?)
    }

    fn of(
        file: File,
        arguments: &Arguments,
        place: String,
        handed: Places,
    ) -> anyhow::Result<Self> {
        let keys = arguments.keys.clone().or(file.keys);
        let keys = keys.map(std::path::absolute).transpose().context("keys")?;
        let wish = SecurityWish {
            keys: keys.clone(),
            default_keys: std::env::var_os("GODWIT_KEYS").map(PathBuf::from),
            peers: file.peers.clone(),
            insecure: false,
        };
        let listen = arguments.listen.clone().or(file.listen);
        let listen = listen.map(|text| tcp(&text)).transpose()?;
        let listen = either(listen, handed.hosts, "listen", Address::to_string)?;
        let listen = listen.map(|address| secured(address, &wish)).transpose()?;
        let socket = arguments.socket.clone().or(file.socket);
        let socket = either(socket, handed.operator, "socket", |path| path.display().to_string())?;
        let state = arguments.state_dir.clone().or(file.state_dir).or_else(usual_state);
        let state = state.context("there is no home: name a --state-dir")?;
        let reserve = file.reserve.map(|text| text.parse::<ByteCount>()).transpose();
        for (name, way) in &file.way {
            check_way(name, way).with_context(|| place.clone())?;
        }
        if let Some(host) = &file.moves {
            let parsed = format!("{host}:0").parse::<Address>();
            parsed.ok().with_context(|| {
                format!("{place}: moves = \"{host}\": write the name or number of this host")
            })?;
        }
        Ok(Self {
            listen,
            socket: socket.unwrap_or_else(|| run_directory::path().join("godwitd")),
            metrics: arguments.metrics.or(file.metrics),
            state: std::path::absolute(&state).context("--state-dir")?,
            reserve: reserve.with_context(|| format!("{place}: reserve"))?,
            at_once: file.at_once.unwrap_or(4).max(1),
            cpus: file.cpus,
            moves: file.moves,
            keys,
            peers: file.peers,
            ways: file.way,
            place,
        })
    }

    /// The names of the ways.
    pub(crate) fn ways(&self) -> Vec<String> {
        self.ways.keys().cloned().collect()
    }

    /// The name of the way that is meant by `wanted`.
    ///
    /// # Errors
    /// When there is none of that name, or several without a name.
    pub(crate) fn way(&self, wanted: Option<&str>) -> Result<&str, String> {
        let names = || self.ways().join(", ");
        let found = match wanted {
            Some(wanted) => self.ways.get_key_value(wanted),
            None if self.ways.len() == 1 => self.ways.iter().next(),
            None => self.ways.get_key_value("default"),
        };
        match (found, wanted) {
            (Some((name, _)), _) => Ok(name),
            (None, _) if self.ways.is_empty() => Err(format!(
                "this host says no way to take guests in: its operator writes one into {}, as in \
                 [way.libvirt] receive = [\"--vm\", \"libvirt:\"]",
                self.place
            )),
            (None, Some(_)) => Err(format!("there is no way of this name here, but {}", names())),
            (None, None) => Err(format!("there are several ways here, name one: {}", names())),
        }
    }

    /// The words of the `godwit receive` that takes `guest` in by `way`.
    pub(crate) fn receive(&self, way: &str, guest: &Guest) -> Result<Vec<String>, String> {
        let way = self.ways.get(way).ok_or("the way is gone")?;
        let memory = exact(ByteCount(guest.memory_bytes));
        let options = way.receive.iter().map(|word| filled(word, &guest.name, &memory));
        let mut words = vec!["receive".to_owned()];
        words.extend(options.collect::<Result<Vec<_>, _>>()?);
        if !words.iter().any(|word| word == "--wait" || word.starts_with("--wait=")) {
            words.extend(["--wait".to_owned(), WAIT.to_owned()]);
        }
        let own = self.listen.as_ref().and_then(|(address, _)| address.host());
        let host = self.moves.as_deref().or(own).unwrap_or("127.0.0.1");
        words.push(format!("--listen={host}:0"));
        words.extend(self.keys.iter().map(|keys| format!("--keys={}", keys.display())));
        words.extend(self.peers.iter().map(|peer| format!("--peer={peer}")));
        words.push("--json".to_owned());
        Ok(words)
    }
}

/// The address at which other hosts are heard.
fn tcp(text: &str) -> anyhow::Result<Address> {
    match text.parse().with_context(|| format!("listen {text}"))? {
        address @ Address::Tcp(_) => Ok(address),
        _ => bail!("listen {text}: hosts ask over TCP, write HOST:PORT"),
    }
}

/// How connections are made at `address`.
fn secured(address: Address, wish: &SecurityWish) -> anyhow::Result<(Address, Security)> {
    let security = wish.destination(&address).with_context(|| format!("listen {address}"))?;
    Ok((address, security))
}

/// What was said, or handed over; both may be only where they are the same.
fn either<T: PartialEq>(
    said: Option<T>,
    handed: Option<T>,
    key: &str,
    text: impl Fn(&T) -> String,
) -> anyhow::Result<Option<T>> {
    if let (Some(said), Some(handed)) = (&said, &handed)
        && said != handed
    {
        bail!(
            "{key} = \"{}\" and a socket handed over at {}: leave out {key}, or the socket unit",
            text(said),
            text(handed)
        );
    }
    Ok(handed.or(said))
}

fn usual_state() -> Option<PathBuf> {
    let records = Store::own(rustix::process::geteuid().is_root())?;
    Some(records.directory().with_file_name("destinations"))
}

fn parse(text: &str) -> anyhow::Result<File> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
        let line = line.map_or_else(String::new, |line| format!("line {line}: "));
        anyhow::anyhow!("{line}{}", error.message().trim().replace('\n', " "))
    })
}

fn check_way(name: &str, way: &Way) -> anyhow::Result<()> {
    if !fits(name) {
        bail!("way '{name}': use up to 48 letters, digits, '-', '_' and '.'");
    }
    let begins = |word: &str, option: &str| {
        word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    };
    let is_ours = |word: &&String| OURS.iter().any(|option| begins(word, option));
    if let Some(word) = way.receive.iter().find(is_ours) {
        bail!("way '{name}': {word} is godwitd's to say: listen, keys and peers are for all ways");
    }
    if !way.receive.iter().any(|word| begins(word, "--vm") || begins(word, "--start")) {
        bail!("way '{name}': it says no VM: --vm libvirt: or --start, as for godwit receive");
    }
    for word in &way.receive {
        filled(word, "name", "1GiB").map_err(|why| anyhow::anyhow!("way '{name}': {why}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn config(text: &str, options: &[&str]) -> anyhow::Result<Config> {
        let words = ["godwitd", "--state-dir", "/tmp/x"];
        let arguments = Arguments::try_parse_from([&words[..], options].concat()).unwrap();
        Config::of(parse(text)?, &arguments, "FILE".to_owned(), Places::default())
    }

    #[test]
    fn what_was_handed_over_is_where_it_listens_unless_something_else_is_said() {
        let of = |text: &str| {
            let arguments =
                Arguments::try_parse_from(["godwitd", "--state-dir", "/tmp/x"]).unwrap();
            let handed = Places {
                hosts: Some("127.0.0.1:7".parse().unwrap()),
                operator: Some(PathBuf::from("/run/x")),
            };
            Config::of(parse(text)?, &arguments, "FILE".to_owned(), handed)
        };
        for text in ["", "listen = \"127.0.0.1:7\"\nsocket = \"/run/x\""] {
            let config = of(text).unwrap();
            assert_eq!(config.listen.unwrap().0.to_string(), "127.0.0.1:7");
            assert_eq!(config.socket, Path::new("/run/x"));
        }
        for text in ["listen = \"127.0.0.1:8\"", "socket = \"/run/y\""] {
            let told = of(text).unwrap_err().to_string();
            assert!(told.contains("and a socket handed over at"), "{told}");
        }
    }

    fn refused(text: &str, options: &[&str]) -> String {
        format!("{:#}", config(text, options).unwrap_err())
    }

    fn guest() -> Guest {
        Guest { name: "web01".to_owned(), memory_bytes: 4 << 30, cpu: None }
    }

    #[test]
    fn a_guest_becomes_the_words_that_the_operator_wrote() {
        let text = "listen = \"127.0.0.1:0\"\n[way.libvirt]\nreceive = [\"--vm\", \"libvirt:\"]\n\
                    [way.made]\nreceive = [\"--start\", \"--map\", \"/a/{name}\", \"--wait=1s\"]";
        let made = config(text, &[]).unwrap();
        let words = |way| made.receive(way, &guest()).unwrap().join(" ");
        let rest = "--listen=127.0.0.1:0 --json";
        assert_eq!(words("libvirt"), format!("receive --vm libvirt: --wait 5min {rest}"));
        assert_eq!(words("made"), format!("receive --start --map /a/web01 --wait=1s {rest}"));
        assert_eq!(made.way(Some("made")).unwrap(), "made");
        assert!(made.way(None).unwrap_err().contains("several ways here, name one: libvirt, made"));
        assert!(made.way(Some("x")).unwrap_err().contains("no way of this name here, but libvirt"));
        let none = config("", &[]).unwrap();
        assert!(none.way(None).unwrap_err().contains("writes one into FILE"));
        let one = config("moves = \"10.0.0.7\"\n[way.a]\nreceive = [\"--vm=libvirt:\"]", &[]);
        let one = one.unwrap();
        assert_eq!(one.way(None).unwrap(), "a");
        assert!(one.receive("a", &guest()).unwrap().contains(&"--listen=10.0.0.7:0".to_owned()));
    }

    #[test]
    fn what_leaves_this_host_needs_keys() {
        for options in [["--listen", "0.0.0.0:7790"], ["--listen", "192.0.2.7:7790"]] {
            let told = refused("", &[&options[..], &["--keys", "/nowhere"]].concat());
            assert!(told.contains("there are no keys in /nowhere"), "{told}");
        }
        if !Path::new(godwit_engine::security::DEFAULT_KEYS).exists() {
            let told = refused("listen = \"0.0.0.0:7790\"", &[]);
            assert!(told.contains("nothing would be encrypted: give both sides keys"), "{told}");
        }
        assert!(refused("", &["--listen", "unix:/x"]).contains("write HOST:PORT"));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_with_its_place() {
        for (text, words) in [
            ("a = 1", "line 1: unknown field `a`"),
            ("\nreserve = \"512\"", "reserve: '512' is ambiguous"),
            ("metrics = \"9709\"", "line 1: "),
            ("[way.a]\nreceive = [\"--vm\", \"libvirt:\", \"--listen=0.0.0.0:1\"]", "godwitd's"),
            ("[way.a]\nreceive = [\"--vm\", \"libvirt:\", \"--insecure\"]", "godwitd's to say"),
            ("[way.a]\nreceive = []", "it says no VM"),
            ("[way.\"a b\"]\nreceive = [\"--start\"]", "use up to 48 letters"),
            ("[way.a]\nreceive = [\"--start\", \"--map={disk}\"]", "nobody knows {disk}"),
            ("moves = \"a:b:c\"", "write the name or number"),
        ] {
            let told = refused(text, &[]);
            assert!(told.contains(words) && !told.contains('\n'), "{text}: {told}");
        }
    }
}
