//! The client against QEMU's own server, `qemu-nbd`: unix sockets and TCP, raw and qcow2, and a
//! server that dies.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use godwit_nbd::{ALLOCATION, Address, Client, DEPTH, HOLE, Link, NbdError, Wish, ZERO};

const SIZE: u64 = 8 << 20;

struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("godwit-nbd-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn image(&self, format: &str) -> PathBuf {
        let path = self.0.join(format!("image.{format}"));
        let size = SIZE.to_string();
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .arg(&path)
            .arg(size)
            .status();
        assert!(made.unwrap().success());
        path
    }
}

impl Place {
    /// Another server of the raw image at the same socket, once it listens.
    fn serve_again(&self) -> Server {
        let socket = self.0.join("nbd");
        std::fs::remove_file(&socket).unwrap();
        let server =
            Server::start(&self.0.join("image.raw"), "raw", &["-k", socket.to_str().unwrap()]);
        drop(connect(&Address::Unix(socket), &Wish::new("disk")));
        server
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Server(Child);

impl Server {
    /// Serves `image` under the name `disk`; `arguments` say where.
    fn start(image: &Path, format: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new("qemu-nbd");
        command
            .args(["-x", "disk", "-t", "--discard=unmap", "-f", format])
            .args(arguments)
            .arg(image);
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    fn at(place: &Place, format: &str) -> (Self, Address) {
        let socket = place.0.join("nbd");
        let image = place.image(format);
        let server = Self::start(&image, format, &["-k", socket.to_str().unwrap()]);
        (server, Address::Unix(socket))
    }

    /// Keeps the server from doing anything, while its socket still takes what it is sent.
    fn stop(&self) {
        assert!(
            Command::new("kill")
                .args(["-STOP", &self.0.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Connects once the server listens.
fn connect(address: &Address, wish: &Wish) -> Client {
    for _ in 0..500 {
        match Client::connect(address, wish) {
            Ok(client) => return client,
            Err(NbdError::Connect { .. }) => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the server does not listen");
}

/// Whether there is a qemu-nbd; says so aloud where there is not.
fn there(test: &str) -> bool {
    let there = ["qemu-nbd", "qemu-img"].iter().all(|program| {
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    });
    if !there {
        let words = format!("\nSKIPPED {test}: there is no qemu-nbd: run `make qemu`\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes());
    }
    there
}

fn wish() -> Wish {
    Wish::new("disk").with_context(ALLOCATION).writable()
}

#[test]
fn what_is_written_is_read_and_zeros_are_holes() {
    if !there("what_is_written_is_read_and_zeros_are_holes") {
        return;
    }
    for format in ["raw", "qcow2"] {
        let place = Place::new();
        let (_server, address) = Server::at(&place, format);
        let mut client = connect(&address, &wish());
        assert_eq!(client.export().size, SIZE);

        let first = client.ask_write(1 << 20, &[7; 1 << 20]).unwrap();
        let second = client.ask_write(3 << 20, &[8; 1 << 20]).unwrap();
        client.take_done(second).unwrap();
        client.take_done(first).unwrap();
        let zeros = client.ask_zeros(3 << 20, 1 << 20).unwrap();
        client.take_done(zeros).unwrap();
        let flush = client.ask_flush().unwrap().unwrap();
        client.take_done(flush).unwrap();

        let status = client.ask_status(0, SIZE as u32).unwrap();
        let status = client.take_status(status).unwrap();
        let flags = |at: u64| {
            let mut all = status[0].iter();
            all.find(|stretch| (stretch.offset..stretch.offset + stretch.length).contains(&at))
                .unwrap()
                .flags
        };
        assert_eq!(flags(1 << 20), 0, "{format}");
        assert_eq!(flags(3 << 20), HOLE | ZERO, "{format}");
        assert_eq!(flags(6 << 20) & ZERO, ZERO, "{format}");

        let blocks = 0..DEPTH as u64;
        let tickets: Vec<_> =
            blocks.clone().map(|block| client.ask_read(block << 19, 1 << 19).unwrap()).collect();
        let mut bytes = vec![0; 1 << 19];
        for (block, ticket) in blocks.zip(tickets) {
            client.take_read(ticket, &mut bytes).unwrap();
            let wanted = if (2..4).contains(&block) { 7 } else { 0 };
            assert!(bytes.iter().all(|byte| *byte == wanted), "{format} {block}");
        }
    }
}

#[test]
fn tcp_serves_as_well() {
    if !there("tcp_serves_as_well") {
        return;
    }
    let place = Place::new();
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let arguments = ["-b", "127.0.0.1", "-p", &port.to_string()];
    let _server = Server::start(&place.image("raw"), "raw", &arguments);
    let mut client = connect(&Address::Tcp(format!("127.0.0.1:{port}")), &wish());
    let write = client.ask_write(4096, &[5; 4096]).unwrap();
    client.take_done(write).unwrap();
    let read = client.ask_read(4096, 4096).unwrap();
    let mut bytes = [0; 4096];
    client.take_read(read, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 4096]);
}

#[test]
fn an_export_that_is_not_there_or_read_only_is_refused() {
    if !there("an_export_that_is_not_there_or_read_only_is_refused") {
        return;
    }
    let place = Place::new();
    let socket = place.0.join("nbd");
    let _server =
        Server::start(&place.image("raw"), "raw", &["-r", "-k", socket.to_str().unwrap()]);
    let address = Address::Unix(socket);
    drop(connect(&address, &Wish::new("disk")));
    let refused = |wish: &Wish| Client::connect(&address, wish).unwrap_err();
    assert!(matches!(refused(&Wish::new("other")), NbdError::Refused { .. }));
    assert!(matches!(refused(&wish()), NbdError::Unfit { .. }));
    let error =
        refused(&Wish::new("disk").with_context(&godwit_nbd::dirty_bitmap("none"))).to_string();
    assert!(error.contains("'disk'") && error.contains("qemu:dirty-bitmap:none"), "{error}");
}

#[test]
fn a_server_that_dies_is_noticed() {
    if !there("a_server_that_dies_is_noticed") {
        return;
    }
    let place = Place::new();
    let (mut server, address) = Server::at(&place, "raw");
    let mut client = connect(&address, &wish());
    server.kill();
    let mut bytes = [0; 4096];
    let lost = client
        .ask_read(0, 4096)
        .and_then(|ticket| client.take_read(ticket, &mut bytes))
        .unwrap_err();
    assert!(lost.is_of_connection() && lost.to_string().contains("'disk'"), "{lost}");
    assert!(client.ask_read(0, 4096).unwrap_err().is_of_connection());
}

#[test]
fn a_link_goes_on_with_another_server_and_forgets_nothing() {
    if !there("a_link_goes_on_with_another_server_and_forgets_nothing") {
        return;
    }
    let place = Place::new();
    let (mut server, address) = Server::at(&place, "raw");
    drop(connect(&address, &wish()));
    let mut link = Link::connect(address, wish()).unwrap();
    link.ask_write(0, &[1; 4096]).and_then(|asked| link.take_done(asked)).unwrap();
    server.stop();
    // Asked of a server that stands still, so that none of it can be done when it dies.
    let write = link.ask_write(8192, &[2; 4096]).unwrap();
    let zeros = link.ask_zeros(0, 4096).unwrap();
    let status = link.ask_status(1 << 20, 4096).unwrap();
    let read = link.ask_read(2 << 20, 4096).unwrap();
    server.kill();
    let _another = place.serve_again();

    link.take_done(zeros).unwrap();
    link.take_done(write).unwrap();
    assert_eq!(link.take_status(status).unwrap()[0].offset, 1 << 20);
    let mut bytes = [9; 4096];
    link.take_read(read, &mut bytes).unwrap();
    let again = link.ask_read(0, 4096).unwrap();
    link.take_read(again, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096]);
    let again = link.ask_read(8192, 4096).unwrap();
    link.take_read(again, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 4096]);
}

#[test]
fn a_link_whose_server_stays_away_ends_with_the_reason() {
    if !there("a_link_whose_server_stays_away_ends_with_the_reason") {
        return;
    }
    let place = Place::new();
    let (mut server, address) = Server::at(&place, "raw");
    drop(connect(&address, &wish()));
    let mut link = Link::connect(address, wish()).unwrap();
    let asked = link.ask_read(0, 4096).unwrap();
    link.take_read(asked, &mut [0; 4096]).unwrap();
    server.kill();
    let mut bytes = [0; 4096];
    let lost =
        link.ask_read(0, 4096).and_then(|asked| link.take_read(asked, &mut bytes)).unwrap_err();
    assert!(matches!(lost, NbdError::Connect { .. }), "{lost}");
}
