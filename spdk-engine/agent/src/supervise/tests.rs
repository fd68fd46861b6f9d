#![allow(clippy::unwrap_used)]
use super::*;
use crate::fake_plane::{Fabric, FakePlane};
use std::path::Path;
use tokio::time::timeout;

/// Bounds what has to happen.
const LONG: Duration = Duration::from_secs(30);

/// Connects to a fake data plane as the supervisor does.
pub(crate) async fn greet(socket: &Path) -> Plane {
    let config = Supervision::new(None, Vec::new(), socket.to_owned(), PathBuf::new());
    let (status, _) = watch::channel(PlaneStatus::default());
    let supervisor = Supervisor { config, status, child: None, last: None, starts: 0 };
    let (client, process) = connect(socket).await.unwrap();
    supervisor.greet(client, process).await.unwrap()
}

/// What a guest writes must never be taken for an lvstore, and no write be sent twice.
#[tokio::test]
async fn a_stock_data_plane_is_told_its_options_before_it_starts() {
    for stock in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let plane = FakePlane::serve(dir.path(), stock, Fabric::default());
        plane.state.lock().unwrap().starting = true;
        greet(&plane.socket).await;
        let state = plane.state.lock().unwrap();
        assert!(!state.starting);
        let told: Vec<String> = state.called("_options").into_iter().chain(state.called("start_init")).collect();
        let calls = state.calls.iter().filter(|(method, _)| told.contains(method));
        let calls: Vec<String> = calls.map(|(method, params)| format!("{method} {params}")).collect();
        let start = "framework_start_init null";
        match stock {
            true => assert_eq!(
                calls,
                [
                    "bdev_set_options {\"bdev_auto_examine\":false}",
                    "bdev_nvme_set_options {\"bdev_retry_count\":0}",
                    start
                ]
            ),
            // It leaves guests' devices alone by itself.
            false => assert_eq!(calls, [start]),
        }
    }
}

#[tokio::test]
async fn whether_an_old_process_has_ended_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (own, foreign) = (supervision(dir.path()), Supervision { program: None, ..supervision(dir.path()) });
    let (status, _) = watch::channel(PlaneStatus::default());
    let (mut child, process) = process::spawn(dir.path(), Path::new("/bin/sleep"), &["1000".to_owned()]).unwrap();
    let of = |config: &Supervision, last| Supervisor {
        config: config.clone(),
        status: status.clone(),
        child: None,
        last,
        starts: 0,
    };
    assert!(!of(&own, None).has_ended(), "the pid file names one that lives");
    assert!(!of(&own, Some(process)).has_ended() && !of(&foreign, Some(process)).has_ended());
    child.kill().await.unwrap();
    assert!(of(&own, None).has_ended() && of(&own, Some(process)).has_ended());
    assert!(of(&foreign, Some(process)).has_ended());
    assert!(!of(&foreign, None).has_ended(), "it was never seen");
    assert!(!PlaneStatus::default().ended, "nobody has looked yet");
}

/// The program of the tests below: this very test binary, serving a fake data plane until it is killed.
#[test]
#[ignore = "run as a child by the other tests"]
fn fake_plane_main() {
    let Ok(dir) = std::env::var("ADDAX_FAKE_PLANE_DIR") else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _plane = FakePlane::serve(Path::new(&dir), false, Fabric::default());
        tokio::time::sleep(Duration::from_secs(120)).await;
    });
}

fn supervision(dir: &Path) -> Supervision {
    let exe = std::env::current_exe().unwrap();
    let script = format!(
        "ADDAX_FAKE_PLANE_DIR={} exec {} --exact supervise::tests::fake_plane_main --ignored",
        dir.display(),
        exe.display()
    );
    let args = vec!["-c".to_owned(), script];
    Supervision {
        ping_interval: Duration::from_millis(50),
        ping_deadline: Duration::from_millis(500),
        ping_misses: 2,
        pause_max: Duration::from_millis(200),
        ..Supervision::new(Some("/bin/sh".into()), args, dir.join("rpc.sock"), dir.to_owned())
    }
}

async fn up(status: &mut watch::Receiver<PlaneStatus>, not: &str) -> Arc<Plane> {
    let wait = status.wait_for(|s| s.plane.as_ref().is_some_and(|plane| plane.instance != not));
    let status = timeout(2 * LONG, wait).await.unwrap().unwrap();
    status.plane.clone().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_or_hung_data_plane_is_restarted_and_a_living_one_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let shutdown = CancellationToken::new();
    let mut status = start(supervision(dir.path()), shutdown.clone());
    let first = up(&mut status, "").await;
    assert!(first.has_mirror() && first.has_uring());
    assert_eq!(status.borrow().restarts, 0);

    first.process.signal(Signal::SIGKILL);
    let second = up(&mut status, &first.instance).await;
    assert_ne!(second.process, first.process);
    assert_eq!(status.borrow().restarts, 1);
    assert!(first.client.is_closed());

    second.process.signal(Signal::SIGSTOP);
    let third = up(&mut status, &second.instance).await;
    assert!(!second.process.is_alive(), "the hung process was not ended");

    // The agent ends; the data plane does not; the next agent finds it.
    shutdown.cancel();
    let again = CancellationToken::new();
    let mut status = start(supervision(dir.path()), again.clone());
    let adopted = up(&mut status, "").await;
    assert_eq!((adopted.process, &adopted.instance), (third.process, &third.instance));
    assert_eq!(status.borrow().restarts, 0);
    again.cancel();
    assert!(stop_data_plane(dir.path(), Duration::from_secs(10)).await);
    assert!(!third.process.is_alive());
    assert!(stop_data_plane(dir.path(), Duration::from_secs(10)).await, "none is left to stop");
}

#[tokio::test]
async fn a_program_that_cannot_start_is_tried_for_ever_and_the_reason_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let missing = Supervision { program: Some("/no/such/engine".into()), ..supervision(dir.path()) };
    let shutdown = CancellationToken::new();
    let mut status = start(missing, shutdown.clone());
    for _ in 0..4 {
        timeout(LONG, status.changed()).await.unwrap().unwrap();
    }
    assert!(status.borrow().reason.contains("/no/such/engine"));
    shutdown.cancel();
    let failing =
        Supervision { args: vec!["-c".into(), "echo wrong option; exit 1".into()], ..supervision(dir.path()) };
    let shutdown = CancellationToken::new();
    let mut status = start(failing, shutdown.clone());
    let told = status.wait_for(|s| s.reason.contains("wrong option"));
    timeout(LONG, told).await.unwrap().unwrap();
    shutdown.cancel();
}

#[tokio::test]
async fn one_that_somebody_else_runs_is_used_and_never_started_or_ended() {
    let dir = tempfile::tempdir().unwrap();
    let config = Supervision { program: None, ..supervision(dir.path()) };
    let shutdown = CancellationToken::new();
    let mut status = start(config, shutdown.clone());
    let down = |status: &PlaneStatus| status.plane.is_none() && status.reason.contains("somebody else");
    timeout(LONG, status.wait_for(down)).await.unwrap().unwrap();
    let plane = FakePlane::serve(dir.path(), false, Fabric::default());
    timeout(LONG, status.wait_for(|status| status.plane.is_some())).await.unwrap().unwrap();
    assert!(process::read_pid_file(dir.path()).is_none());
    plane.kill();
    timeout(LONG, status.wait_for(|status| status.plane.is_none())).await.unwrap().unwrap();
    let _again = FakePlane::serve(dir.path(), false, Fabric::default());
    status.wait_for(|status| status.plane.is_some()).await.unwrap();
    shutdown.cancel();
}

/// What a process that is stuck in its disk was writing may still land.
#[tokio::test]
async fn none_is_started_beside_one_that_does_not_die() {
    let dir = tempfile::tempdir().unwrap();
    let mut stuck = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let process = ProcessId::of(i32::try_from(stuck.id()).unwrap()).unwrap();
    let (status, _) = watch::channel(PlaneStatus::default());
    let supervisor =
        Supervisor { config: supervision(dir.path()), status, child: None, last: Some(process), starts: 1 };
    assert!(matches!(supervisor.check_none_lives(), Err(SuperviseError::Undead { pid }) if pid == process.pid));
    stuck.kill().unwrap();
    stuck.wait().unwrap();
    supervisor.check_none_lives().unwrap();
}
