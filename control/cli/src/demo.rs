//! `addax demo`: the main job end to end on one machine, with engines killed in the middle; cleans up after itself.
//!
//! *Flow.* Three nodes up ─▶ a volume with three replicas, attached ─▶ writes with verification over NVMe/TCP ─▶ a replica's
//! engine killed ─▶ the attached node's engine killed ─▶ degraded, rebuilt, healthy ─▶ everything read back ─▶ detached ─▶
//! all replicas byte for byte equal, and each one right when its disk is served by itself ─▶ down, and nothing left.
//!
//! *When things fail.* Any mismatch, any I/O error and any wait that takes too long ends it with an error and a non-zero
//! exit code; processes and files are removed all the same (`--keep` keeps the files).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use addax_api::volume::{Consistency, Robustness};
use addax_api::{Replica, Volume, VolumeSpec};
use anyhow::{Context, Result, bail, ensure};
use blobstore_format::image::{Image, Mode};
use blobstore_format::read::ReadFn;
use blobstore_format::{BlobId, ReadAt};
use clap::Args;
use kube::api::ListParams;
use kube::{Client, ResourceExt};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::cluster::layout::{Cluster, DataPlaneChoice, Layout};
use crate::cluster::process::Daemon;
use crate::cluster::{self, UpOptions};
use crate::output::bytes;
use crate::verbs::{api, api_error, volume, wait_until};

const VOLUME: &str = "demo";
const HOST: &str = "nqn.2026-11.io.addax:host:demo";
/// A check of everything, what was never written included, in large reads.
const CHECK: [&str; 4] = ["--phase", "check", "--bs", "64k"];
/// How long each phase of a load may take, on a slow machine as well.
const LOAD_DEADLINE: Duration = Duration::from_secs(600);
/// Pauses that are told of a phase.
const PAUSES_SHOWN: usize = 4;
/// How long each wait may take.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Size of the volume.
    #[arg(long, default_value = "1GiB", value_parser = crate::output::parse_size)]
    size: i64,
    /// Data to write.
    #[arg(long, default_value = "512MiB", value_parser = crate::output::parse_size)]
    write: i64,
    /// A stock spdk_tgt as the data plane of a node, or of all; may be repeated.
    #[arg(long, value_name = "[NODE=]PROGRAM")]
    data_plane: Vec<DataPlaneChoice>,
    /// Keep the cluster's folder.
    #[arg(long)]
    keep: bool,
}

/// What happened when, for the reader.
struct Timeline {
    start: Instant,
}

impl Timeline {
    fn tell(&self, text: impl AsRef<str>) {
        println!("{:7.2} s  {}", self.start.elapsed().as_secs_f64(), text.as_ref());
    }
}

pub async fn run(args: DemoArgs) -> Result<()> {
    let dir = std::env::temp_dir().join(format!("addax-demo-{}", std::process::id()));
    let layout = Layout::new(Some(dir.clone()))?;
    let timeline = Timeline { start: Instant::now() };
    let mut ended = signal(SignalKind::terminate())?;
    let result = tokio::select! {
        result = play(&layout, &args, &timeline) => result,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        _ = ended.recv() => Err(anyhow::anyhow!("ended by a signal")),
    };
    if result.is_err() {
        show_logs(&layout);
    }
    let cleaned = cluster::down(&layout, !args.keep).await;
    let left = cluster::processes_of_folder(&dir.to_string_lossy());
    result?;
    cleaned?;
    ensure!(left.is_empty(), "processes are left: {left:?}");
    ensure!(args.keep || !dir.exists(), "{} is left", dir.display());
    timeline.tell("no process and no file is left; the demo has passed");
    Ok(())
}

async fn play(layout: &Layout, args: &DemoArgs, timeline: &Timeline) -> Result<()> {
    let data_planes = args.data_plane.clone();
    let options = UpOptions { nodes: Some(3), data_port: 4420, disk_size: None, data_planes, quiet: true };
    let cluster = cluster::up(layout, &options).await?;
    let client = cluster::client(layout).await?;
    timeline.tell("3 nodes are ready, each with its own address, manager, agent, engine and disk");
    for node in cluster.nodes.iter().filter(|node| node.data_plane.is_some()) {
        timeline.tell(format!("{} runs a stock data plane", node.name));
    }
    volume::create(&client, VOLUME, VolumeSpec::with_size(args.size)).await?;
    volume::wait_created(&client, VOLUME, PATIENCE).await?;
    timeline.tell(format!("volume {VOLUME:?} of {} is declared, with 3 replicas", bytes(args.size)));
    let node = cluster.nodes[0].name.clone();
    let endpoint = volume::attach(&client, VOLUME, &node, &[HOST.to_owned()], PATIENCE).await?;
    let target = format!("{}:{}", endpoint.traddr, endpoint.trsvcid);
    timeline.tell(format!("attached to {node}, served at {target}"));
    tell_consistency(&client, timeline).await?;

    let log = layout.dir().join("writes.log");
    let size = args.write.to_string();
    let write = ["--phase", "write", "--rw", "randrw", "--mix", "30", "--bs", "16k", "--size", &size];
    let mut load = perf(&target, &endpoint.nqn, &log, &write)?;
    under_load(&client, &cluster, layout, &mut load, timeline).await?;
    let report = finish(load, "writes under load").await?;
    tell_report(timeline, "written, with reads verified in between", &report);
    ensure!(report["write"]["write"]["bytes"].as_i64() >= Some(args.write), "less was written than was asked for");

    wait_healthy(&client).await?;
    timeline.tell("rebuilt and healthy: all 3 replicas are in sync");
    let again = perf(&target, &endpoint.nqn, &log, &CHECK)?;
    tell_report(timeline, "read back", &finish(again, "read-back").await?);
    volume::detach(&client, VOLUME, PATIENCE).await?;
    timeline.tell("detached: drained, flushed, recorded as clean");

    let copies = copies(&client, layout).await?;
    cluster::down(layout, false).await?;
    check_replicas(layout, &copies, &log, timeline).await
}

/// What the volume promises, where that is less than it could be.
async fn tell_consistency(client: &Client, timeline: &Timeline) -> Result<()> {
    let volume = api::<Volume>(client).get(VOLUME).await.map_err(api_error)?;
    if volume.status.and_then(|status| status.consistency) == Some(Consistency::BestEffort) {
        timeline.tell("consistency: bestEffort, since a stock raid1 does not wait for the record");
    }
    Ok(())
}

/// Kills a replica's engine, then the attached node's, while the load runs.
async fn under_load(
    client: &Client,
    cluster: &Cluster,
    layout: &Layout,
    load: &mut Child,
    timeline: &Timeline,
) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(1)).await;
    ensure_running(load)?;
    // An agent starts a killed engine again within the second that a mirror waits for a lost member: held for a moment, it
    // lets the absence last.
    let name = format!("{}-agent", cluster.nodes[1].name);
    let agent = Daemon::new(&layout.run(), &layout.log(), &name).pid().context("the agent of node-2 is not there")?;
    kill(agent, Signal::SIGSTOP)?;
    kill_engine(layout, &cluster.nodes[1].name)?;
    timeline.tell("kill -9: the engine of node-2, which holds a replica (its agent is held until that shows)");
    let degraded = wait_robustness(client, Robustness::Degraded).await;
    kill(agent, Signal::SIGCONT)?;
    degraded?;
    timeline.tell("degraded: writes go on with the replicas that are left");
    ensure_running(load)?;
    let before = epoch(client).await?;
    kill_engine(layout, &cluster.nodes[0].name)?;
    timeline.tell("kill -9: the engine of node-1, which serves the volume");
    wait_until(&api::<Volume>(client), VOLUME, PATIENCE, "open again", |found| {
        let config = found?.status.as_ref()?.config.as_ref()?;
        (config.epoch > before).then_some(())
    })
    .await?;
    timeline.tell("open again with a new epoch; the other replicas are being rebuilt");
    Ok(())
}

async fn epoch(client: &Client) -> Result<u64> {
    let volume = api::<Volume>(client).get(VOLUME).await.map_err(api_error)?;
    Ok(volume.status.and_then(|s| s.config).map(|c| c.epoch).unwrap_or_default())
}

fn ensure_running(load: &mut Child) -> Result<()> {
    match load.try_wait()? {
        None => Ok(()),
        Some(status) => bail!("the load has ended already, with {status}: nothing would be killed under writes"),
    }
}

fn kill_engine(layout: &Layout, node: &str) -> Result<()> {
    let socket = layout.engine_socket(node);
    let pids = cluster::processes_with_argument(&socket.to_string_lossy());
    ensure!(pids.len() == 1, "{} engines run on {node}, not one", pids.len());
    kill(pids[0], Signal::SIGKILL).with_context(|| format!("kill the engine of {node}"))
}

async fn wait_robustness(client: &Client, wanted: Robustness) -> Result<()> {
    let what = wanted.as_str();
    wait_until(&api::<Volume>(client), VOLUME, PATIENCE, what, |found| {
        (found?.status.as_ref()?.robustness == wanted).then_some(())
    })
    .await
}

async fn wait_healthy(client: &Client) -> Result<()> {
    wait_until(&api::<Volume>(client), VOLUME, PATIENCE, "healthy", |found| {
        let volume = found?;
        let config = volume.status.as_ref()?.config.as_ref()?;
        (volume::is_healthy(volume) && config.in_sync.len() == 3).then_some(())
    })
    .await
}

fn sibling(name: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.exists(), "{} is missing: build all programs", path.display());
    Ok(path)
}

fn perf(target: &str, nqn: &str, log: &Path, more: &[&str]) -> Result<Child> {
    let child = Command::new(sibling("addax-perf")?)
        .args(["verify", "--target", target, "--nqn", nqn, "--host-nqn", HOST, "--expect-volume", VOLUME])
        .arg("--log")
        .arg(log)
        .args(["--quiet", "-o", "json"])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("start addax-perf")?;
    Ok(child)
}

async fn finish(child: Child, what: &str) -> Result<Value> {
    let output = tokio::time::timeout(LOAD_DEADLINE, child.wait_with_output()).await;
    let output = output.with_context(|| format!("{what}: no end within {} s", LOAD_DEADLINE.as_secs()))??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{what} failed ({}):\n{text}", output.status);
    }
    serde_json::from_str(&text).with_context(|| format!("{what}: the report is not JSON:\n{text}"))
}

fn tell_report(timeline: &Timeline, what: &str, report: &Value) {
    timeline.tell(format!("{what}:"));
    for line in report_lines(report) {
        println!("           {line}");
    }
}

/// A copy of the volume: an lvol on a disk file.
struct Copy {
    name: String,
    disk: PathBuf,
}

async fn copies(client: &Client, layout: &Layout) -> Result<Vec<Copy>> {
    let of_volume = ListParams::default().labels(&format!("{}={VOLUME}", addax_api::LABEL_VOLUME));
    let replicas = api::<Replica>(client).list(&of_volume).await.map_err(api_error)?;
    let copies: Vec<Copy> =
        replicas.iter().map(|r| Copy { name: r.name_any(), disk: layout.disk_file(&r.spec.node_id) }).collect();
    ensure!(copies.len() == 3, "{} replicas instead of 3", copies.len());
    Ok(copies)
}

/// Serves each replica by itself and verifies it, then compares all of them byte by byte.
async fn check_replicas(layout: &Layout, copies: &[Copy], log: &Path, timeline: &Timeline) -> Result<()> {
    let images = copies.iter().map(open_image).collect::<Result<Vec<_>>>()?;
    for (copy, image) in copies.iter().zip(&images).skip(1) {
        ensure!(equal(&copies[0].name, &images[0], &copy.name, image)?, "{} and {} differ", copies[0].name, copy.name);
    }
    timeline.tell("all 3 replicas are equal, byte for byte");
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.local_addr()?.port()
    };
    let config = layout.dir().join("replicas.json");
    let stores: Vec<String> = images.iter().map(|image| image.names.name.clone()).collect();
    std::fs::write(&config, serve_config(copies, &stores, port).to_string())?;
    let mut engine = Command::new(sibling("addax-engine")?)
        .arg("-r")
        .arg(layout.run().join("replicas.sock"))
        .args(["--no-huge", "-s", "64", "-c"])
        .arg(&config)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("start addax-engine")?;
    let checked = check_each(copies, log, port, timeline).await;
    let _ = engine.kill().await;
    checked
}

async fn check_each(copies: &[Copy], log: &Path, port: u16, timeline: &Timeline) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(Instant::now() < until, "the replicas are not served in time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for Copy { name, .. } in copies {
        let nqn = addax_api::nqn::replica_nqn(name);
        let report = finish(perf(&format!("127.0.0.1:{port}"), &nqn, log, &CHECK)?, name).await?;
        tell_report(timeline, &format!("{name}, read by itself"), &report);
    }
    Ok(())
}

/// The disks, and each replica's lvol behind a subsystem of its own.
fn serve_config(copies: &[Copy], stores: &[String], port: u16) -> Value {
    let mut bdevs = Vec::new();
    let mut nvmf = vec![json!({ "method": "nvmf_create_transport", "params": { "trtype": "TCP" } })];
    for (Copy { name, disk }, store) in copies.iter().zip(stores) {
        let nqn = addax_api::nqn::replica_nqn(name);
        let file = json!({ "name": format!("d.{name}"), "filename": disk, "block_size": 4096 });
        bdevs.push(json!({ "method": "bdev_uring_create", "params": file }));
        let subsystem = json!({ "nqn": nqn, "serial_number": "REPLICA", "allow_any_host": true });
        nvmf.push(json!({ "method": "nvmf_create_subsystem", "params": subsystem }));
        let namespace = json!({ "nqn": nqn, "namespace": { "bdev_name": format!("{store}/{name}") } });
        nvmf.push(json!({ "method": "nvmf_subsystem_add_ns", "params": namespace }));
        let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
        let listener = json!({ "nqn": nqn, "listen_address": address });
        nvmf.push(json!({ "method": "nvmf_subsystem_add_listener", "params": listener }));
    }
    bdevs.push(json!({ "method": "bdev_wait_for_examine" }));
    json!({ "subsystems": [{ "subsystem": "bdev", "config": bdevs }, { "subsystem": "nvmf", "config": nvmf }] })
}

/// A disk's lvstore, read without any engine.
fn open_image(copy: &Copy) -> Result<Image<impl ReadAt>> {
    let file = File::open(&copy.disk).with_context(|| format!("open {}", copy.disk.display()))?;
    let size = file.metadata()?.len();
    let source = ReadFn { size, read: move |offset, buf: &mut [u8]| file.read_exact_at(buf, offset) };
    Image::open(source, Mode::AsMarked).with_context(|| format!("{} is no lvstore", copy.disk.display()))
}

/// An lvol and its size in bytes.
fn find_lvol(image: &Image<impl ReadAt>, name: &str) -> Result<(BlobId, u64)> {
    let lvol = image.find(name).with_context(|| format!("there is no lvol {name}"))?;
    Ok((lvol.id, image.size(lvol)))
}

fn equal(a: &str, image_a: &Image<impl ReadAt>, b: &str, image_b: &Image<impl ReadAt>) -> Result<bool> {
    let lvol_a = find_lvol(image_a, a)?;
    let lvol_b = find_lvol(image_b, b)?;
    if lvol_a.1 != lvol_b.1 {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0u8; 1 << 20], vec![0u8; 1 << 20]);
    let mut at = 0;
    while at < lvol_a.1 {
        let count = usize::try_from(lvol_a.1 - at).unwrap_or(usize::MAX).min(left.len());
        image_a.read(lvol_a.0, at, &mut left[..count], &())?;
        image_b.read(lvol_b.0, at, &mut right[..count], &())?;
        if left[..count] != right[..count] {
            return Ok(false);
        }
        at += count as u64;
    }
    Ok(true)
}

fn show_logs(layout: &Layout) {
    let Ok(entries) = std::fs::read_dir(layout.log()) else { return };
    for entry in entries.flatten() {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("--- {}", entry.file_name().to_string_lossy());
        for line in &lines[lines.len().saturating_sub(15)..] {
            eprintln!("{line}");
        }
    }
}

/// A report of `addax-perf verify` in a few readable lines.
fn report_lines(report: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for (phase, sides) in [("write", &["write", "read"][..]), ("check", &["read"][..])] {
        let load = &report[phase];
        if !load.is_object() {
            continue;
        }
        for side in sides {
            lines.push(format!("{phase} phase, {side}s: {}", rate(&load[side])));
        }
        lines.push(format!(
            "{phase} phase: {} I/O errors, {} reconnects, {} I/Os sent again",
            load["errors"], load["reconnects"], load["retries"]
        ));
        lines.extend(pause_line(load).map(|line| format!("{phase} phase: {line}")));
    }
    lines.push(format!("mismatches: {}", report["mismatches_total"]));
    lines
}

/// The longest times without an answer, longest first.
fn pause_line(load: &Value) -> Option<String> {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let all = load["pauses"].as_array()?;
    let mut pauses: Vec<(f64, f64)> = all.iter().map(|p| (number(&p["length_s"]), number(&p["start_s"]))).collect();
    pauses.sort_by(|a, b| b.0.total_cmp(&a.0));
    let longest: Vec<String> =
        pauses.iter().take(PAUSES_SHOWN).map(|(length, start)| format!("{length:.2} s (at {start:.2} s)")).collect();
    (!longest.is_empty()).then(|| format!("{} pauses over 0.1 s, the longest {}", pauses.len(), longest.join(", ")))
}

fn rate(side: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mib = f64::from(1 << 20);
    let latency = |name: &str| number(&side["latency_us"][name]);
    format!(
        "{:.0} MiB, {:.0} MiB/s, {:.0} IOPS; latency p50 {:.0} µs, p99 {:.0} µs, p99.9 {:.0} µs",
        number(&side["bytes"]) / mib,
        number(&side["bytes_per_s"]) / mib,
        number(&side["iops"]),
        latency("p50"),
        latency("p99"),
        latency("p99.9")
    )
}
