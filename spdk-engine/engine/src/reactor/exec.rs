//! Local tasks: control sequences written as `async` code, run on the core that started them.
//!
//! Tasks never move between threads; a wake from another thread comes as mail. I/O does not go through tasks.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::thread::ThreadId;

use async_task::Runnable;

use super::mail::Mailbox;

thread_local! {
    static READY: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

/// The tasks of one core.
pub(super) struct LocalTasks {
    mail: Mailbox,
    thread: ThreadId,
    _not_send: std::marker::PhantomData<Rc<()>>,
}

impl LocalTasks {
    pub(super) fn new(mail: Mailbox) -> Self {
        Self { mail, thread: std::thread::current().id(), _not_send: std::marker::PhantomData }
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let (mail, thread) = (self.mail.clone(), self.thread);
        let schedule = move |runnable: Runnable| {
            if std::thread::current().id() == thread {
                READY.with(|q| q.borrow_mut().push_back(runnable));
            } else {
                mail.post(move |_| READY.with(|q| q.borrow_mut().push_back(runnable)));
            }
        };
        let (runnable, task) = async_task::spawn_local(future, schedule);
        task.detach();
        runnable.schedule();
    }

    pub(super) fn run(&self, most: usize) -> bool {
        for count in 0..most {
            let next = READY.with(|q| q.borrow_mut().pop_front());
            let Some(runnable) = next else { return count > 0 };
            runnable.run();
        }
        true
    }
}
