//! Reading a layer's frames over HTTP beside a plain client:
//! `frame_bench STORE_DIR REFERENCE [BYTES_PER_SECOND]`.
//!
//! Starts nginx on the loopback with STORE_DIR as its root (each connection limited to
//! BYTES_PER_SECOND, if given) and reads all packs of the layer, alternating: in parts of 4 MiB by
//! a plain client on bare sockets that throws the bytes away, over one connection and over as many
//! as the read path has; and the layer's frames, verified and decompressed, through the read path.
//! Five rounds after one to warm up, medians.
#![allow(clippy::print_stdout, reason = "a program that reports")]

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use layerpack_store::{
    Delivery, Key, LayerMap, LayerStore, Locator, PackLoc, ReadLimits, Reference, open_url, recycle,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Connections of the plain client when it has several.
const CONNECTIONS: usize = ReadLimits::RECOMMENDED.requests;
/// Longest request of the read path, in bytes.
const PART: u64 = 4 << 20;

/// nginx in the foreground; ended on drop.
struct Server {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Server {
    fn start(root: &Path, limit: Option<u64>) -> Outcome<Self> {
        let dir = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let limit = limit.map_or_else(String::new, |n| format!("limit_rate {n};"));
        // Root's workers would become another user, who may not read the store.
        let root_owned = std::os::unix::fs::MetadataExt::uid(&fs_err::metadata("/proc/self")?) == 0;
        let user = if root_owned { "user root;" } else { "" };
        let config = format!(
            "daemon off; {user} worker_processes 1; pid {dir}/pid; error_log {dir}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;\n\
             client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};\n\
             uwsgi_temp_path {dir}; scgi_temp_path {dir};\n\
             server {{ listen 127.0.0.1:{port}; root {root}; {limit} }} }}\n",
            dir = dir.path().display(),
            root = root.display(),
        );
        let file = dir.path().join("nginx.conf");
        fs_err::write(&file, config)?;
        let child = Command::new("nginx").arg("-c").arg(&file).spawn()?;
        let server = Self {
            child,
            port,
            _dir: dir,
        };
        for _ in 0..200 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("nginx does not answer".into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The master ends its worker when it is asked to, not when it is killed.
        let _ = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        let _ = self.child.wait();
    }
}

/// A part of an object.
type Part = (Key, std::ops::Range<u64>);

/// The packs in parts of what the read path asks for at most.
fn parts(packs: &[PackLoc]) -> Vec<Part> {
    let mut parts = Vec::new();
    for pack in packs {
        let mut at = 0;
        while at < pack.size {
            let end = (at + PART).min(pack.size);
            parts.push((Key::pack(&pack.id), at..end));
            at = end;
        }
    }
    parts
}

/// Bytes of the bodies of the next parts, until there are none, over one connection.
fn plain(port: u16, parts: &[Part], next: &AtomicUsize) -> Result<u64, String> {
    let text = |e: std::io::Error| e.to_string();
    let stream = TcpStream::connect(("127.0.0.1", port)).map_err(text)?;
    let mut reader = BufReader::with_capacity(256 << 10, stream);
    let mut bytes = 0;
    while let Some((key, range)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
        write!(
            reader.get_mut(),
            "GET /{key} HTTP/1.1\r\nHost: localhost\r\nRange: bytes={}-{}\r\n\r\n",
            range.start,
            range.end - 1
        )
        .map_err(text)?;
        let mut length = None;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).map_err(text)?;
            if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = n.trim().parse::<u64>().ok();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let length = length.ok_or_else(|| format!("{key}: no length"))?;
        let mut body = (&mut reader).take(length);
        let got = std::io::copy(&mut body, &mut std::io::sink()).map_err(text)?;
        if got != length || got != range.end - range.start {
            return Err(format!("{key}: {got} of {length} bytes"));
        }
        bytes += got;
    }
    Ok(bytes)
}

fn plain_over(connections: usize, port: u16, parts: &[Part]) -> Result<u64, String> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|_| scope.spawn(|| plain(port, parts, &next)))
            .collect();
        threads
            .into_iter()
            .map(|t| {
                t.join()
                    .unwrap_or_else(|_| Err("a thread panicked".to_owned()))
            })
            .sum()
    })
}

struct Layer {
    store: LayerStore,
    locator: Locator,
    map: LayerMap,
}

impl Layer {
    fn open(url: &str, reference: &Reference) -> Outcome<Self> {
        let store = LayerStore::new(open_url(url)?);
        let (_, manifest) = store.load(reference)?;
        let map = store.map(&manifest)?;
        let locator = store.locator(&manifest, &map)?;
        Ok(Self {
            store,
            locator,
            map,
        })
    }

    /// Bytes received, raw bytes, requests for each GiB.
    fn read(&self) -> Outcome<(u64, u64, u64)> {
        let frames = u32::try_from(self.locator.frames().len())?;
        let all: Vec<u32> = (0..frames).collect();
        let mut raw = 0;
        let stats = self.store.read_frames_with(
            &self.locator,
            &all,
            ReadLimits::RECOMMENDED,
            Delivery::AsFetched,
            &mut |_, bytes| {
                raw += bytes.len() as u64;
                recycle(bytes);
                Ok(())
            },
        )?;
        Ok((stats.bytes, raw, stats.requests_per_gib()))
    }
}

fn mib(bytes: u64, began: Instant) -> f64 {
    bytes as f64 / f64::from(1 << 20) / began.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: frame_bench STORE_DIR REFERENCE [BYTES_PER_SECOND]";
    let root = fs_err::canonicalize(arguments.next().ok_or(usage)?)?;
    let reference: Reference = arguments.next().ok_or(usage)?.parse()?;
    let limit = arguments.next().map(|n| n.parse()).transpose()?;
    let server = Server::start(&root, limit)?;
    let layer = Layer::open(&format!("http://127.0.0.1:{}", server.port), &reference)?;
    let packs = layer.locator.packs();
    let parts = parts(packs);
    println!(
        "{reference}: {} MiB of data in {} frames of {} packs, {} MiB stored",
        layer.map.data_size() >> 20,
        layer.locator.frames().len(),
        packs.len(),
        layer.locator.stored_bytes() >> 20
    );
    let (mut one, mut several, mut frames) = (Vec::new(), Vec::new(), Vec::new());
    let mut per_gib = 0;
    for round in 0..6 {
        let began = Instant::now();
        let first = mib(plain_over(1, server.port, &parts)?, began);
        let began = Instant::now();
        let second = mib(plain_over(CONNECTIONS, server.port, &parts)?, began);
        let began = Instant::now();
        let (bytes, raw, requests) = layer.read()?;
        let third = mib(bytes, began);
        per_gib = requests;
        println!(
            "round {round}: plain {first:.0} MiB/s, plain over {CONNECTIONS} connections {second:.0} MiB/s, frames {third:.0} MiB/s stored, {:.0} MiB/s raw",
            third * raw as f64 / bytes.max(1) as f64
        );
        if round > 0 {
            one.push(first);
            several.push(second);
            frames.push(third);
        }
    }
    let (one, several, frames) = (median(one), median(several), median(frames));
    println!(
        "medians: frames {frames:.0} MiB/s, {:.0}% of plain over one connection ({one:.0}), {:.0}% of plain over {CONNECTIONS} ({several:.0}); {per_gib} requests per GiB",
        100.0 * frames / one,
        100.0 * frames / several
    );
    Ok(())
}
