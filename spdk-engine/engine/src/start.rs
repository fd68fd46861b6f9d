//! Start and stop of the process: cores, pools, the application, signals.

use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use addax_hugepages::BufPool;

use crate::app::{App, Options};
use crate::reactor::idle::Policy;
use crate::reactor::net::KernelNet;
use crate::reactor::uring::UringDriver;
use crate::reactor::{CONTROL, Core, CoreId, Peer, Reactor};

/// What to run.
#[derive(Debug, Clone)]
pub struct StartConfig {
    /// One data core per entry, pinned to that processor.
    pub cpus: Vec<u32>,
    pub pool: BufPool,
    pub options: Options,
    /// Whether threads are pinned.
    pub pin: bool,
}

/// Runs the engine on this thread (which becomes the control core) until [`Core::stop`] on it.
///
/// `init` is called on the control core once all cores run.
///
/// # Errors
/// When a core's io_uring cannot be made.
pub fn run(config: StartConfig, init: impl FnOnce(App) + 'static) -> std::io::Result<()> {
    let driver = Box::new(UringDriver::new()?);
    let (mut control, control_peer) = Reactor::new(CONTROL, driver, config.pool.clone(), Policy::SLEEP);
    let mut peers = vec![control_peer];
    let mut threads = Vec::new();
    let policy = if config.options.interrupt_mode { Policy::SLEEP } else { Policy::POLL };
    let (send_peers, receive): (Vec<_>, Vec<_>) =
        config.cpus.iter().map(|_| std::sync::mpsc::channel::<Arc<Vec<Peer>>>()).unzip();
    for (index, (cpu, receive)) in config.cpus.iter().copied().zip(receive).enumerate() {
        let id = CoreId(index as u32 + 1);
        let (answer, made) = std::sync::mpsc::channel();
        let (pool, pin) = (config.pool.clone(), config.pin);
        let name = format!("reactor_{cpu}");
        threads.push(thread::Builder::new().name(name).spawn(move || {
            if pin {
                pin_to(cpu);
            }
            let made = data_driver(&pool).map(|driver| Reactor::new(id, Box::new(driver), pool, policy));
            let (mut reactor, mut peer) = match made {
                Ok(made) => made,
                Err(error) => {
                    let _ = answer.send(Err(error));
                    return;
                }
            };
            peer.cpu = pin.then_some(cpu);
            peer.stats.tid.store(thread_id(), std::sync::atomic::Ordering::Relaxed);
            let _ = answer.send(Ok(peer));
            let Ok(peers) = receive.recv() else { return };
            reactor.set_peers(peers);
            reactor.run();
        })?);
        let peer = made.recv().map_err(|_| std::io::Error::other("a reactor ended at its start"))??;
        peers.push(peer);
    }
    peers[0].stats.tid.store(thread_id(), std::sync::atomic::Ordering::Relaxed);
    let peers = Arc::new(peers);
    for sender in send_peers {
        let _ = sender.send(Arc::clone(&peers));
    }
    control.set_peers(Arc::clone(&peers));
    let app = App::new(control.core().clone(), Rc::new(KernelNet), config.options);
    control.core().defer(move |_| init(app));
    control.run();
    for peer in peers.iter().skip(1) {
        peer.mail.post(Core::stop);
    }
    for thread in threads {
        let _ = thread.join();
    }
    Ok(())
}

/// The driver of a data core: disk I/O happens here, from buffers of the pool.
fn data_driver(pool: &BufPool) -> std::io::Result<UringDriver> {
    let mut driver = UringDriver::new()?;
    driver.register(pool);
    Ok(driver)
}

fn thread_id() -> u64 {
    nix::unistd::gettid().as_raw() as u64
}

fn pin_to(cpu: u32) {
    let mut set = nix::sched::CpuSet::new();
    let pinned =
        set.set(cpu as usize).and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set));
    if let Err(error) = pinned {
        tracing::warn!(cpu, %error, "cannot pin a reactor to its processor; it runs anywhere");
    }
}
