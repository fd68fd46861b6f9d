//! Runs asynchronous code on simulated disks, one step at a time, in an order drawn from a seed.
//!
//! There is no clock and no thread: at each step either a task that was woken is polled or a disk executes one of its
//! waiting operations. When neither is possible although the main task has not ended, the run is [`Stuck`]: a
//! deadlock, found at once. Tasks that remain when a run ends, or is abandoned, are dropped as at a power cut.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::power::{DiskOp, PowerDisk};
use super::rng::Rng;

/// No test needs more steps.
pub const STEPS: u64 = 200_000_000;

/// Nothing can go on and the main task has not ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the run is stuck after {steps} steps with {tasks} tasks that wait for nothing or never end")]
pub struct Stuck {
    /// Steps made.
    pub steps: u64,
    /// Tasks that have not ended, the main task included.
    pub tasks: usize,
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Names of the tasks that were woken. Only the waker needs it to be shared safely.
#[derive(Debug, Default)]
struct Woken(Mutex<Vec<u64>>);

impl Woken {
    fn with<T>(&self, change: impl FnOnce(&mut Vec<u64>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct TaskWaker {
    task: u64,
    woken: Arc<Woken>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.woken.with(|woken| {
            if !woken.contains(&self.task) {
                woken.push(self.task);
            }
        });
    }
}

/// Starts tasks beside the one that holds it.
#[derive(Clone, Default)]
pub struct Spawner(Rc<RefCell<Vec<Task>>>);

impl std::fmt::Debug for Spawner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Spawner").field("new", &self.0.borrow().len()).finish()
    }
}

impl Spawner {
    /// Starts a task at the next step; dropped with the run.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.0.borrow_mut().push(Box::pin(task));
    }
}

/// One run. See the module.
pub struct Exec {
    disks: Vec<PowerDisk>,
    rng: Rng,
    spawner: Spawner,
    steps: u64,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Exec").field("disks", &self.disks.len()).field("steps", &self.steps).finish()
    }
}

impl Exec {
    /// A run on these disks.
    pub fn new(seed: u64, disks: &[&PowerDisk]) -> Self {
        let disks = disks.iter().map(|disk| (*disk).clone()).collect();
        Self { disks, rng: Rng::new(seed), spawner: Spawner::default(), steps: 0 }
    }

    /// Starts further tasks; give clones of it to the main task.
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// Runs until the main task ends.
    ///
    /// # Errors
    /// [`Stuck`].
    pub fn run<T>(&mut self, main: impl Future<Output = T>) -> Result<T, Stuck> {
        let unstopped = self.run_with(main, |_, _| ControlFlow::Continue(()))?;
        unstopped.ok_or(Stuck { steps: self.steps, tasks: 0 })
    }

    /// As [`Exec::run`]; `executed` is called after each operation of a disk, with the disk's place in the list. When it
    /// breaks, everything is dropped where it stands and there is no result.
    ///
    /// # Errors
    /// [`Stuck`].
    pub fn run_with<T>(
        &mut self,
        main: impl Future<Output = T>,
        mut executed: impl FnMut(usize, &DiskOp) -> ControlFlow<()>,
    ) -> Result<Option<T>, Stuck> {
        let woken = Arc::new(Woken::default());
        let mut main = Box::pin(main);
        let mut tasks: BTreeMap<u64, Task> = BTreeMap::new();
        let mut next = 1;
        woken.with(|woken| woken.push(0));
        loop {
            for task in self.spawner.0.borrow_mut().drain(..) {
                tasks.insert(next, task);
                woken.with(|woken| woken.push(next));
                next += 1;
            }
            self.steps += 1;
            let ready = woken.with(|woken| woken.len());
            let busy: Vec<usize> = (0..self.disks.len()).filter(|&disk| self.disks[disk].is_busy()).collect();
            if (ready == 0 && busy.is_empty()) || self.steps > STEPS {
                return Err(Stuck { steps: self.steps, tasks: tasks.len() + 1 });
            }
            if ready == 0 || (!busy.is_empty() && self.rng.percent(40)) {
                let disk = busy[self.rng.index(busy.len())];
                if let Some(op) = self.disks[disk].step()
                    && executed(disk, &op).is_break()
                {
                    return Ok(None);
                }
                continue;
            }
            let drawn = self.rng.index(ready);
            let task = woken.with(|woken| woken.swap_remove(drawn));
            let waker = Waker::from(Arc::new(TaskWaker { task, woken: Arc::clone(&woken) }));
            let mut context = Context::from_waker(&waker);
            if task == 0 {
                if let Poll::Ready(value) = main.as_mut().poll(&mut context) {
                    return Ok(Some(value));
                }
            } else if let Some(future) = tasks.get_mut(&task)
                && future.as_mut().poll(&mut context).is_ready()
            {
                tasks.remove(&task);
            }
        }
    }
}

/// Lets other tasks and the disks go on a step.
pub async fn pause() {
    let mut paused = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
