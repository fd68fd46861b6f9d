//! Bytes that are no requests, to the sockets of a data plane: the RPC socket and the NVMe/TCP port.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use e2e::cluster::Random;
use serde_json::Value;

/// Bounds each wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Connections with random bytes to each port.
const RANDOM_CONNECTIONS: u64 = 40;

/// Length of an initialise-connection request.
const IC_BYTES: usize = 128;

/// Requests, and code and words of the error that answers them.
const REQUESTS: &[(&str, i64, &str)] = &[
    ("garbage", -32700, "Parse error"),
    ("\"x\"", -32700, "Parse error"),
    ("\u{0}\u{1}\u{2}", -32700, "Parse error"),
    ("{\"jsonrpc\": \"2.0\" \"id\"", -32700, "Parse error"),
    ("[]", -32600, "Invalid request"),
    ("{\"jsonrpc\": \"2.0\", \"id\": 1}", -32600, "Invalid request"),
    ("{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": 5}", -32600, "Invalid request"),
    ("{\"jsonrpc\": \"1.0\", \"id\": 1, \"method\": \"spdk_get_version\"}", -32600, "Invalid request"),
    ("{\"jsonrpc\": \"2.0\", \"id\": {}, \"method\": \"spdk_get_version\"}", -32600, "Invalid request"),
    ("{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"no_such\"}", -32601, "Method not found"),
    (
        "{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"bdev_get_bdevs\", \"params\": {\"name\": 5}}",
        -32603,
        "spdk_json_decode_object failed",
    ),
    (
        "{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"bdev_malloc_create\", \"params\": {\"num_blocks\": 0, \
         \"block_size\": 512}}",
        -22,
        "Invalid argument",
    ),
    (
        "{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"nvmf_delete_subsystem\", \"params\": {\"nqn\": \
         \"nqn.2026-11.io.addax:volume:none\"}}",
        -32602,
        "'nqn.2026-11.io.addax:volume:none' not found",
    ),
];

/// Sends every malformed request to the socket, then a good one.
pub fn refuse_rpc(socket: &Path) {
    // Stays half sent while everything else goes on.
    let mut half = UnixStream::connect(socket).unwrap();
    half.write_all(b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"met").unwrap();
    for (request, code, words) in REQUESTS {
        let answer = ask(socket, request.as_bytes());
        let answer: Value = serde_json::from_slice(&answer).unwrap_or_else(|e| panic!("{request}: {e}"));
        assert_eq!(answer["error"]["code"], *code, "{request}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{request}: {answer}");
    }
    // Without end, nested without end, and longer than any request.
    assert_eq!(ask(socket, b"{"), b"");
    for request in ["[".repeat(100_000), format!("{{\"method\": \"{}", "x".repeat(40 << 20))] {
        let answer = ask(socket, request.as_bytes());
        assert!(String::from_utf8_lossy(&answer).contains("-32700"), "{:?}", String::from_utf8_lossy(&answer));
    }
    let version = ask(socket, b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"spdk_get_version\"}");
    assert!(String::from_utf8_lossy(&version).contains("result"));
}

/// Everything that comes back for some bytes. The engine may hang up before it has read all of them.
fn ask(socket: &Path, request: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(request).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("no end of the answer: {error}"),
        _ => answer,
    }
}

/// The header that all PDUs have.
fn header(kind: u8, flags: u8, header_bytes: u8, data_offset: u8, bytes: u32) -> Vec<u8> {
    [&[kind, flags, header_bytes, data_offset][..], &bytes.to_le_bytes()].concat()
}

/// An initialise-connection request whose fields after the header start with `fields`.
fn connect_pdu(header: Vec<u8>, fields: &[u8]) -> Vec<u8> {
    let mut pdu = [header, fields.to_vec()].concat();
    pdu.resize(IC_BYTES, 0);
    pdu
}

fn good_connect() -> Vec<u8> {
    connect_pdu(header(0, 0, 128, 0, 128), &[])
}

fn padded(mut pdu: Vec<u8>, bytes: usize) -> Vec<u8> {
    pdu.resize(bytes, 0);
    pdu
}

/// What is wrong, whether it comes after a good start, the bytes, and the fatal error status of the answer.
fn pdus() -> Vec<(&'static str, bool, Vec<u8>, u16)> {
    const FIELD: u16 = 1;
    const SEQUENCE: u16 = 2;
    vec![
        ("another protocol", false, b"GET / HTTP/1.1\r\n\r\n".to_vec(), SEQUENCE),
        ("unknown type", false, connect_pdu(header(0x77, 0, 128, 0, 128), &[]), SEQUENCE),
        ("the controller's own type", false, connect_pdu(header(1, 0, 128, 0, 128), &[]), SEQUENCE),
        ("a command first", false, padded(header(4, 0, 72, 0, 72), 72), SEQUENCE),
        ("header length", false, connect_pdu(header(0, 0, 100, 0, 128), &[]), FIELD),
        ("length of 0", false, connect_pdu(header(0, 0, 128, 0, 0), &[]), FIELD),
        ("length of 4 GiB", false, connect_pdu(header(0, 0, 128, 0, u32::MAX), &[]), FIELD),
        ("format version", false, connect_pdu(header(0, 0, 128, 0, 128), &[9, 0]), FIELD),
        ("alignment", false, connect_pdu(header(0, 0, 128, 0, 128), &[0, 0, 77]), FIELD),
        ("a second start", true, good_connect(), SEQUENCE),
        ("ones", true, vec![0xff; 300], FIELD),
        ("a command's header length", true, padded(header(4, 0, 8, 0, 72), 72), FIELD),
        ("a command's data offset", true, padded(header(4, 0, 72, 200, 136), 136), FIELD),
        ("a length below the header's", true, padded(header(4, 0, 72, 0, 8), 72), FIELD),
        ("data that nobody asked for", true, padded(header(6, 0, 24, 24, 40), 40), FIELD),
    ]
}

/// Sends every malformed PDU to the port; each is answered by a termination that says what is wrong.
pub fn refuse_pdus(address: &SocketAddr) {
    for (what, started, pdu, status) in pdus() {
        let mut stream = if started { start(address) } else { open(address) };
        stream.write_all(&pdu).unwrap();
        let answer = read_pdu(&mut stream);
        assert_eq!(answer[0], 3, "{what}: not a termination: {answer:02x?}");
        assert_eq!(u16::from_le_bytes([answer[8], answer[9]]), status, "{what}: {answer:02x?}");
    }
    let mut random = Random::seeded();
    for _ in 0..RANDOM_CONNECTIONS {
        let mut stream = if random.below(2) == 0 { open(address) } else { start(address) };
        let bytes: Vec<u8> = (0..=random.below(4096)).map(|_| random.below(256) as u8).collect();
        // The engine may hang up before it has read all.
        let _ = stream.write_all(&bytes).and_then(|()| stream.flush());
    }
    drop(start(address));
}

/// Connections that stop in the middle, to be held open.
pub fn half_open(address: &SocketAddr) -> Vec<TcpStream> {
    let mut held: Vec<TcpStream> = (0..16).map(|_| open(address)).collect();
    held[1].write_all(&[0]).unwrap();
    held[2].write_all(&good_connect()[..IC_BYTES - 1]).unwrap();
    let mut started = start(address);
    started.write_all(&padded(header(4, 0, 72, 0, 72), 40)).unwrap();
    held.push(started);
    held
}

fn open(address: &SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connection with a good start.
fn start(address: &SocketAddr) -> TcpStream {
    let mut stream = open(address);
    stream.write_all(&good_connect()).unwrap();
    let answer = read_pdu(&mut stream);
    assert_eq!((answer[0], answer.len()), (1, IC_BYTES), "{answer:02x?}");
    stream
}

fn read_pdu(stream: &mut TcpStream) -> Vec<u8> {
    let mut pdu = vec![0; 8];
    stream.read_exact(&mut pdu).unwrap();
    let bytes = u32::from_le_bytes([pdu[4], pdu[5], pdu[6], pdu[7]]) as usize;
    assert!((8..=IC_BYTES + 24).contains(&bytes), "{pdu:02x?}");
    pdu.resize(bytes, 0);
    stream.read_exact(&mut pdu[8..]).unwrap();
    pdu
}
