//! A network card in a process of its own: a vhost-user back end between a guest and a tap.
//!
//! `vhost-user-tap SOCKET NAMESPACE PORT` listens at `SOCKET` for one QEMU, carries frames between
//! its card and the tap `PORT` of the network namespace `NAMESPACE`, and ends with the connection.
//! What the guest receives is written by this process alone, through a mapping of its own. It has
//! no dirty log (`VHOST_F_LOG_ALL`), for want of which QEMU would not migrate the guest.
//!
//! ```text
//!   front   what QEMU says: memory, queues, when they start and stop
//!   card    what is in the queues
//!   tap     frames to and from the host
//! ```
//!
//! rust-vmm's vhost-user-backend would not do: QEMU enables the queues of a card before it has
//! acknowledged any feature, which that takes for an error, and ends the connection.

mod card;
mod front;
mod tap;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, poll};

use card::Card;
use front::Front;

fn serve(socket: &Path, namespace: &Path, port: &str) -> anyhow::Result<()> {
    let mut tap = tap::open(namespace, port)?;
    let listener = UnixListener::bind(socket).context("cannot listen")?;
    let mut front = Front::new(listener.accept().context("nobody has come")?.0);
    let mut card = Card::default();
    loop {
        let (said, came) = {
            let mut waits =
                vec![PollFd::new(front.stream(), PollFlags::IN), PollFd::new(&tap, PollFlags::IN)];
            waits.extend(card.kicks().map(|kick| PollFd::new(kick, PollFlags::IN)));
            poll(&mut waits, None)?;
            (!waits[0].revents().is_empty(), !waits[1].revents().is_empty())
        };
        if said && !front.hear(&mut card)? {
            return Ok(());
        }
        card.take_kicks();
        // A guest that has arrived does not notify again what waits since before its move.
        card.send(&mut tap)?;
        if came {
            card.receive(&mut tap)?;
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let served = match arguments.as_slice() {
        [socket, namespace, port] => serve(Path::new(socket), Path::new(namespace), port),
        _ => (|| bail!("usage: vhost-user-tap SOCKET NAMESPACE PORT"))(),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-user-tap: {error:#}");
            ExitCode::FAILURE
        }
    }
}
