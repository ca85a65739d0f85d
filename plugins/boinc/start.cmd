@echo off
rem Starts a job of a minigrid project under a BOINC client on Windows. What it does: start.py.
rem The client starts projects/PROJECT/NAME.cmd in the slot directory, and cmd.exe takes that for
rem the command "projects" with the argument "/PROJECT/NAME.cmd". So a copy of this file has to
rem lie in the slot as projects.cmd (open_name); the odd argument tells start.py the folder.
setlocal
set "PYTHON="
call :try py -3
call :try python3
call :try python
if not defined PYTHON goto native
call %PYTHON% -I -B start.py %* 2>>stderr.txt
exit /b %errorlevel%

:try
if defined PYTHON exit /b 0
call %* -I -c "import sys; sys.exit(sys.version_info < (3, 9))" >nul 2>nul && set "PYTHON=%*"
exit /b 0

:native
set "FIRST=%~1"
if "%FIRST:~0,1%"=="/" shift /1
if "%~1"=="native" goto program
>>stderr.txt echo start.cmd: this job needs Python 3.9 or newer, and none was found here.
>>stderr.txt echo Please install it for all users: https://www.python.org/downloads/
exit /b 127

:program
set "REST= %*"
set "REST=%REST:* native =%"
for /f "tokens=1*" %%p in ("%REST%") do (set "PROGRAM=%%p" & set "ARGUMENTS=%%q")
if not exist checkpoint if exist out del out
call ".\%PROGRAM%" %ARGUMENTS% <in >stdout.txt 2>>stderr.txt
set "STATUS=%errorlevel%"
if not "%STATUS%"=="0" exit /b %STATUS%
if not exist out move /y stdout.txt out >nul
>boinc_finish_called echo 0
exit /b 0
